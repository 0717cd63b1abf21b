"""What an attention backend is told and what it must offer.

Owns the metadata of a step and the protocol. Never computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from nv_kernels.kv import KVCache, KVLayout


@dataclass(frozen=True)
class AttentionShape:
    """What a backend is built for.

    Attributes:
        device: where the tensors live.
        dtype: of queries and output.
        num_q_heads: Hq of this rank, a multiple of num_kv_heads.
        num_kv_heads: Hkv of this rank.
        head_dim: D.
        block_size: tokens a block.
    """

    device: torch.device
    dtype: torch.dtype
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


@dataclass(frozen=True)
class AttentionMetadata:
    """Which queries and which blocks belong to which of a step's S sequences.

    Attributes:
        query_start: [S+1] int32; sequence i owns query rows query_start[i] to query_start[i+1].
        context_lens: [S] int32, this step's tokens included; 0: an empty row, whose output is 0.
        block_tables: [S, W] int32; entries past a sequence's last block are never read.
        max_query_len: host bound on the query lengths (a bucket's, not the exact value).
        max_context_len: host bound on the context lengths.
        num_decodes: the first num_decodes sequences have one query row each.
    """

    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    max_query_len: int
    max_context_len: int
    num_decodes: int


class AttentionBackend(Protocol):
    """Causal attention over paged keys and values. Stateless between steps.

    A backend is built as `Backend(shape: AttentionShape, reason: str)`.
    """

    @property
    def name(self) -> str:
        """The name `attention_backend` knows it by."""

    @property
    def reason(self) -> str:
        """Why it was picked, one sentence."""

    def kv_layout(self, num_blocks: int, dtype: torch.dtype) -> KVLayout:
        """Say how a layer's cache must lie in memory.

        Args:
            num_blocks: blocks in the pool.
            dtype: of the cache; torch.float8_e4m3fn for fp8.
        """

    def plan(self, metadata: AttentionMetadata) -> Any:  # noqa: ANN401  each backend's own type
        """Prepare a step, once for all layers. Opaque to callers, handed back to `attend`."""

    def attend(
        self,
        q: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        plan: Any,  # noqa: ANN401  each backend's own type
        scale: float,
    ) -> torch.Tensor:
        """Let each query see its own sequence up to itself.

        Args:
            q: [T, Hq, D].
            kv: the layer's cache, this step's tokens already stored.
            metadata: the step's.
            plan: what `plan` made of this metadata.
            scale: multiplies q.k.

        Returns:
            [T, Hq, D] in q's dtype, as `nv_kernels.reference.attention` defines it.
        """
