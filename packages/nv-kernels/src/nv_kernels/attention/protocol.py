"""The protocol of an attention backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

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

    def refusal(self, spec: AttentionSpec) -> str | None:
        """Return why it cannot compute layers of a spec, in one sentence; None if it can."""

    def plan(
        self, metadata: AttentionMetadata, windows: Collection[int | None] = (None,)
    ) -> Mapping[int | None, Any]:
        """Prepare a step, once for all its layers.

        Callers pass the plans to `attend` unread, before they prepare the next step.

        Args:
            metadata: the step's.
            windows: each `AttentionSpec.window` of the layers.

        Returns:
            By window, the plan of the layers that have it.
        """

    def attend(
        self,
        q: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        plan: Any,  # noqa: ANN401  each backend's own type
        spec: AttentionSpec,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend each query to the keys of its own sequence, up to its own position.

        Args:
            q: [T, Hq, D].
            kv: the layer's cache, with this step's tokens stored. On a card, the keys and values of
                a decode row, except its newest, may be read before the previous kernel has ended:
                an earlier step must have stored them, or `store_kv` or `copy_blocks`, which never
                let the next kernel start early.
            metadata: the step's.
            plan: what `plan` returned for this metadata, at the spec's window.
            spec: how the layer attends; `refusal` returned None for it.
            sinks: [Hq] a logit for each query head, in any floating-point dtype, if the spec has
                sinks; else None.

        Returns:
            [T, Hq, D] in q's dtype, as `nv_kernels.reference.attention` defines it.
        """
