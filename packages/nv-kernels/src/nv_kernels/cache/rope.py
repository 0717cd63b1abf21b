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
    """Rotate each head's two halves by the token's angles (RoFormer; NeoX pairing).

    Args:
        x: [T, H, D], D even.
        positions: [T] int32 or int64, each in [0, max_position).
        cos_sin: [max_position, D] fp32, cosines (D/2) then sines (D/2).

    Returns:
        [T, H, D] in x's dtype.
    """
    rows = cos_sin.index_select(0, positions).to(x.dtype).unsqueeze(1)  # [T, 1, D]
    cos, sin = rows.chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@op(triton="nv_kernels.cache.triton_rope", cpp="nv_kernels.cpp.rope")
def qk_norm_rope_store(  # noqa: PLR0917  the projection's own order
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv: KVCache,
    slot_mapping: torch.Tensor,
    num_q_heads: int,
) -> torch.Tensor:
    """Turn a fused projection into rotated queries and stored keys and values.

    Args:
        qkv: [T, (Hq + 2 Hkv) D], queries then keys then values. It is not changed.
        q_weight: [D] weight of the queries' norm.
        k_weight: [D] weight of the keys' norm. If both are None, there is no norm.
        eps: epsilon of both norms.
        positions: [T] int32 or int64.
        cos_sin: [max_position, D] fp32, as `apply_rope`'s.
        kv: the layer's cache; its shape gives Hkv and D.
        slot_mapping: [T], as `store_kv`'s.
        num_q_heads: Hq.

    Returns:
        Queries [T, Hq, D] in qkv's dtype.
    """
    assert (q_weight is None) == (k_weight is None), "give both norm weights or neither"
    num_kv_heads, head_dim = kv.k.shape[2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)  # [T, Hq + 2 Hkv, D]
    num_rotated = num_q_heads + num_kv_heads
    rotated, v = heads[:, :num_rotated], heads[:, num_rotated:]
    if q_weight is not None and k_weight is not None:
        weights = (q_weight.expand(num_q_heads, -1), k_weight.expand(num_kv_heads, -1))
        rotated = rms_norm.definition(rotated, torch.cat(weights), eps)
    rotated = apply_rope.definition(rotated, positions, cos_sin)
    store_kv.definition(rotated[:, num_q_heads:], v, kv, slot_mapping)
    return rotated[:, :num_q_heads].contiguous()
