"""Rotary position embedding, alone and fused with the q/k norm and the cache write.

Owns the rotation and its rounding points, which are transformers': the fp32 table is rounded
to the activations' dtype, then each product and the sum. nv-models computes the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.cache.write import store_kv
from nv_kernels.elementwise.norm import rms_norm
from nv_kernels.op import op

if TYPE_CHECKING:
    from nv_kernels.cache.layout import KVCache


@op(triton="nv_kernels.cache.triton_rope", cpp="nv_kernels.cpp.rope")
def apply_rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of each head's first R elements (RoFormer; NeoX pairing).

    Args:
        x: [T, H, D], D even.
        positions: [T] int32 or int64, each in [0, max_position).
        cos_sin: [max_position, R] fp32, cosines (R/2) then sines (R/2), R <= D and even. What lies
            after the first R elements of a head is not changed.

    Returns:
        [T, H, D] in x's dtype.
    """
    rotated = cos_sin.shape[1]
    rows = cos_sin.index_select(0, positions).to(x.dtype).unsqueeze(1)  # [T, 1, R]
    cos, sin = rows.chunk(2, dim=-1)
    first, second = x[..., :rotated].chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, x[..., rotated:]), dim=-1)


@op(triton="nv_kernels.cache.triton_rope", cpp="nv_kernels.cpp.rope")
def qk_norm_rope_store(  # noqa: PLR0917  the projection's own order
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    kv: KVCache,
    slot_mapping: torch.Tensor,
    num_q_heads: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Turn a fused projection into rotated queries and stored keys and values.

    Args:
        qkv: [T, (Hq + 2 Hkv) D], queries then keys then values. It is not changed.
        q_weight: [D] weight of the queries' norm, in qkv's dtype or fp32, as `rms_norm`'s.
        k_weight: [D] weight of the keys' norm. If both are None, there is no norm.
        eps: epsilon of both norms.
        positions: [T] int32 or int64.
        cos_sin: [max_position, R] fp32, as `apply_rope`'s; None: nothing is rotated.
        kv: the layer's cache; its shape gives Hkv and D.
        slot_mapping: [T], as `store_kv`'s.
        num_q_heads: Hq.
        dtype: of the queries, which partials do not show; None: that of qkv.

    Returns:
        Queries [T, Hq, D].
    """
    assert (q_weight is None) == (k_weight is None), "give both norm weights or neither"
    assert dtype in {None, qkv.dtype}, "on a CPU a product is never partials"
    num_kv_heads, head_dim = kv.k.shape[2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)  # [T, Hq + 2 Hkv, D]
    num_rotated = num_q_heads + num_kv_heads
    rotated, v = heads[:, :num_rotated], heads[:, num_rotated:]
    if q_weight is not None and k_weight is not None:
        weights = (q_weight.expand(num_q_heads, -1), k_weight.expand(num_kv_heads, -1))
        rotated = rms_norm.definition(rotated, torch.cat(weights), eps)
    if cos_sin is not None:
        rotated = apply_rope.definition(rotated, positions, cos_sin)
    store_kv.definition(rotated[:, num_q_heads:], v, kv, slot_mapping)
    return rotated[:, :num_q_heads].contiguous()
