"""What an attention backend must offer.

Owns the protocol. Never computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from nv_kernels.attention.metadata import AttentionMetadata
    from nv_kernels.cache.layout import KVCache, KVLayout


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

    @property
    def is_capturable(self) -> bool:
        """True if a CUDA graph can capture its steps: it never waits for the device."""

    @property
    def compiles(self) -> bool:
        """True if `compile_ahead` can compile its kernels before a step launches them."""

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
            kv: the layer's cache, this step's tokens already stored. On a card a decode row's keys
                and values but its newest may be read before the kernel ahead has ended: an earlier
                step has stored them, or `store_kv` or `copy_blocks`, which let nothing start early.
            metadata: the step's.
            plan: what `plan` made of this metadata.
            scale: multiplies q.k.

        Returns:
            [T, Hq, D] in q's dtype, as `nv_kernels.reference.attention` defines it.
        """
