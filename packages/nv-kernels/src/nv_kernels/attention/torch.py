"""Attention over paged keys and values with torch's own operations: the CPU's hot path.

Owns the grouping of a step's sequences into few torch calls. Never loops over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nv_kernels import reference
from nv_kernels.kv import KVLayout

if TYPE_CHECKING:
    import torch

    from nv_kernels.attention.base import AttentionMetadata, AttentionShape
    from nv_kernels.kv import KVCache


@dataclass(frozen=True)
class TorchAttention:
    """The `torch` backend, on any device.

    Attributes:
        shape: what it was built for.
        reason: why it was picked.
        name: "torch".
    """

    shape: AttentionShape
    reason: str
    name: str = "torch"

    def kv_layout(self, num_blocks: int, dtype: torch.dtype) -> KVLayout:
        """Say how a layer's cache must lie in memory."""
        shape = self.shape
        return KVLayout(
            num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype, "NHD"
        )

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare a step."""

    def attend(
        self, q: torch.Tensor, kv: KVCache, metadata: AttentionMetadata, plan: None, scale: float
    ) -> torch.Tensor:
        """Let each query see its own sequence up to itself."""
        return reference.attention(q, kv, metadata, scale)
