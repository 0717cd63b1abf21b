"""Launches the kernel that attends from the projection of one token, where it fits.

Imports Gluon: import this module only as `backend` does, on a Hopper card.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.attention.triton.projected_kernel import projected_attention_kernel
from nv_kernels.attention.triton.scores import score_scale
from nv_kernels.launch.sizes import next_power_of_2

if TYPE_CHECKING:
    from nv_kernels.attention.metadata import AttentionMetadata, AttentionSpec
    from nv_kernels.attention.projection import Projection
    from nv_kernels.attention.triton.plan import Buffers
    from nv_kernels.cache.layout import KVCache

WARPS = 4
PIECES = 16
"""At most, of one kv head."""
MOST_GROUP = 7  # query heads beside the newest key in 8 lines


def projection_fits(
    projection: Projection, kv: KVCache, spec: AttentionSpec, block_tables: torch.Tensor
) -> bool:
    """Return whether the kernel supports these; the step and the card are the caller's matter."""
    qkv, cos_sin = projection.qkv, projection.cos_sin
    weights = (projection.q_weight, projection.k_weight)
    num_kv_heads, head_dim = kv.k.shape[2:]
    return (
        qkv.dim() == 2
        and qkv.dtype == projection.dtype == kv.k.dtype == torch.bfloat16
        and head_dim in {64, 128}
        and projection.num_q_heads <= MOST_GROUP * num_kv_heads
        and cos_sin is not None
        and cos_sin.shape[1] == head_dim
        and spec.softcap is None
        and not spec.sinks
        and all(weight is None or weight.dtype == torch.bfloat16 for weight in weights)
        and (weights[0] is None) == (weights[1] is None)
        and block_tables.stride(1) == 1
        and all(
            tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
            for tensor in (qkv, cos_sin, *weights)
            if tensor is not None
        )
        and all(stride % 8 == 0 for stride in kv.k.stride()[:3])
    )


def attend_one(
    projection: Projection,
    kv: KVCache,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    buffers: Buffers,
) -> torch.Tensor:
    """Norm, rotate, store and attend; `projection_fits` must hold.

    Args:
        projection: of one token per row.
        kv: the layer's cache.
        metadata: the step's.
        spec: a scale alone, or a window that hides no key.
        buffers: of the backend.

    Returns:
        [T, Hq, D].
    """
    qkv, q_weight, k_weight, eps, positions, cos_sin, slots, num_q_heads, dtype = projection
    num_kv_heads, head_dim = kv.k.shape[2:]
    group, rows = num_q_heads // num_kv_heads, qkv.shape[0]
    out = torch.empty(rows, num_q_heads, head_dim, dtype=dtype, device=qkv.device)
    room = next_power_of_2(rows * num_q_heads * PIECES)
    k, v = kv.stored()
    projected_attention_kernel[(PIECES, num_kv_heads, rows)](
        qkv, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight,
        positions, cos_sin, slots, metadata.context_lens, metadata.block_tables, k, v, out,
        buffers.get("projected partials", room * head_dim, torch.float32),
        buffers.get("projected sums", room, torch.float32),
        buffers.get("projected counters", room, torch.int32),
        metadata.block_tables.stride(0), eps, score_scale(spec),
        num_kv_heads, group, next_power_of_2(group), head_dim, k.shape[1], *k.stride()[:3],
        PIECES, WARPS, q_weight is not None,
        num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
    return out
