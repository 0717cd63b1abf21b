"""What an attention backend must offer.

Owns the protocol. Never computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from nv_kernels.kv import KVCache, KVLayout
    from nv_kernels.metadata import AttentionMetadata


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


@runtime_checkable
class FusedDecode(Protocol):
    """What a backend may offer besides: a decode step's attention straight from the projection."""

    def attend_decode(  # noqa: PLR0917  the projection's own order
        self,
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor,
        kv: KVCache,
        slot_mapping: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any,  # noqa: ANN401  each backend's own type
        scale: float,
    ) -> torch.Tensor:
        """Do what `qk_norm_rope_store` and then `attend` do, for a step of decode rows alone.

        Args:
            qkv: [S, (Hq + 2 Hkv) D], or partials, as `qk_norm_rope_store`'s. Row i belongs to
                sequence i, and its position is context_lens[i] - 1.
            q_weight: [D] weight of the queries' norm.
            k_weight: [D] weight of the keys' norm; both None: no norm.
            eps: of both norms.
            cos_sin: [max_position, D] fp32.
            kv: the layer's cache; holds this step's tokens afterwards.
            slot_mapping: [S]: where the block table has position context_lens[i] - 1, or -1:
                nothing is stored, as of a row of context length 0.
            metadata: the step's; num_decodes is S.
            plan: what `plan` made of this metadata.
            scale: multiplies q.k.

        Returns:
            [S, Hq, D], as `nv_kernels.reference.attend_decode` defines it.
        """
