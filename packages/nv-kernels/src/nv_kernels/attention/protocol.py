"""The protocol of an attention backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from nv_kernels.attention.metadata import AttentionMetadata, AttentionSpec
    from nv_kernels.cache.layout import KVCache, KVLayout


class AttentionBackend(Protocol):
    """Causal attention over paged keys and values. Stateless between steps.

    A backend is built as `Backend(shape: AttentionShape, reason: str)`.
    """

    @property
    def name(self) -> str:
        """Its name in `attention_backend`."""

    @property
    def reason(self) -> str:
        """Why it was picked, in one sentence."""

    @property
    def is_capturable(self) -> bool:
        """True if a CUDA graph can capture its steps: it never waits for the device."""

    @property
    def compiles(self) -> bool:
        """True if `compile_ahead` can compile its kernels before a step launches them."""

    def kv_layout(self, num_blocks: int, dtype: torch.dtype) -> KVLayout:
        """Return the layout that a layer's cache must have.

        Args:
            num_blocks: blocks in the pool.
            dtype: of the cache; torch.float8_e4m3fn for fp8.
        """

    def plan(self, metadata: AttentionMetadata) -> Any:  # noqa: ANN401  each backend's own type
        """Prepare a step, once for all layers. Callers pass the result to `attend` unread."""

    def attend(
        self,
        q: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        plan: Any,  # noqa: ANN401  each backend's own type
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Attend each query to the keys of its own sequence, up to its own position.

        Args:
            q: [T, Hq, D].
            kv: the layer's cache, with this step's tokens stored. On a card, the keys and values of
                a decode row, except its newest, may be read before the previous kernel has ended:
                an earlier step must have stored them, or `store_kv` or `copy_blocks`, which never
                let the next kernel start early.
            metadata: the step's.
            plan: what `plan` returned for this metadata.
            spec: how the layer attends.

        Returns:
            [T, Hq, D] in q's dtype, as `nv_kernels.reference.attention` defines it.
        """
