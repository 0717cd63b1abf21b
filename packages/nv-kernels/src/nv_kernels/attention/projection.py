"""Attention from a layer's projection: norm and rope of q and k, the cache write, and attention.

Owns the choice between one launch, where a backend has it, and the two ops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from nv_kernels.cache.rope import qk_norm_rope_store

if TYPE_CHECKING:
    import torch

    from nv_kernels.attention.metadata import AttentionMetadata, AttentionSpec
    from nv_kernels.attention.protocol import AttentionBackend
    from nv_kernels.cache.layout import KVCache


class Projection(NamedTuple):
    """The arguments of `qk_norm_rope_store` but the cache, in its order."""

    qkv: torch.Tensor
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    positions: torch.Tensor
    cos_sin: torch.Tensor | None
    slot_mapping: torch.Tensor
    num_q_heads: int
    dtype: torch.dtype


def attend_projection(  # noqa: PLR0917  the order of `attend`
    backend: AttentionBackend,
    projection: Projection,
    kv: KVCache,
    metadata: AttentionMetadata,
    plan: Any,  # noqa: ANN401  each backend's own type
    spec: AttentionSpec,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn a projection into queries, stored keys and values, and attend.

    A backend may have a method `attend_projection` with these arguments but itself, which returns
    None where it has no launch for them.

    Args:
        backend: computes the attention.
        projection: of the layer, for all tokens of the step.
        kv: the layer's cache; this step's keys and values are stored there.
        metadata: the step's.
        plan: what the backend's `plan` returned.
        spec: how the layer attends.
        sinks: [Hq], if the spec has sinks.

    Returns:
        [T, Hq, D], as `AttentionBackend.attend` of what `qk_norm_rope_store` returns.
    """
    in_one_launch = getattr(backend, "attend_projection", None)
    if in_one_launch is not None:
        attended: torch.Tensor | None = in_one_launch(
            projection, kv, metadata, plan, spec, sinks=sinks
        )
        if attended is not None:
            return attended
    qkv, q_weight, k_weight, eps, positions, cos_sin, slots, heads, dtype = projection
    q = qk_norm_rope_store(
        qkv, q_weight, k_weight, eps, positions, cos_sin, kv, slots, heads, dtype
    )
    return backend.attend(q, kv, metadata, plan, spec, sinks=sinks)
