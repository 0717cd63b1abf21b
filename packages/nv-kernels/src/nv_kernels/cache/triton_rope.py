"""From the fused projection to rotated queries and stored keys and values, in one launch.

Owns the q/k norm and the rotation, with the rounding points of `nv_kernels.reference`.
`triton_write` has the write itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nv_kernels.cache.triton_write import ELEMENTS, store_half
from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.launch.triton_previous import wait_for_previous

if TYPE_CHECKING:
    from nv_kernels.cache.layout import KVCache


@triton.jit
def rotate(first, second, cos, sin, dtype: tl.constexpr):
    """Rotate halves given in fp32, each product and sum rounded to dtype as torch rounds."""
    a = (first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)
    b = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
    return a.to(dtype), b.to(dtype)


@triton.jit
def halves(lane, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr):
    """The places of a lane's two elements in a head: pairs of the rotation, then the others."""
    if ROTATED == HEAD_DIM or ROTATED == 0:  # noqa: PLR1714  # Triton has no `in`
        return lane, HEAD_DIM // 2 + lane
    else:
        other = lane + ROTATED // 2
        low = tl.where(lane < ROTATED // 2, lane, other)
        high = tl.where(lane < ROTATED // 2, other, HEAD_DIM // 2 + lane)
        return low, high


@triton.jit
def load_half(ptr, spot, mask, plane, NUM_PARTIALS: tl.constexpr, dtype: tl.constexpr):
    """Load activations in fp32; partials are summed in order and rounded to dtype first."""
    x = tl.load(ptr + spot, mask=mask, other=0.0).to(tl.float32)
    if NUM_PARTIALS > 1:
        for index in tl.static_range(1, NUM_PARTIALS):
            x += tl.load(ptr + index * plane + spot, mask=mask, other=0.0).to(tl.float32)
    return x.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens", "plane"])
def rope_store_kernel(
    x_ptr,
    q_weight_ptr,
    k_weight_ptr,
    positions_ptr,
    cos_sin_ptr,
    slots_ptr,
    out_ptr,
    k_ptr,
    v_ptr,
    num_tokens,
    plane,
    eps,
    k_inverse_scale,
    v_inverse_scale,
    NUM_HEADS: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    X_TOKEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    KV_TOKEN: tl.constexpr,
    KV_HEAD: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    ROTATED: tl.constexpr,
    FP8: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes HEADS heads of one token: queries, then keys, then values.

    x [P, T, NUM_HEADS * D] with token stride X_TOKEN and partial stride `plane`; out [T, Hq, D].
    HALF: D / 2 rounded up to a power of two. NUM_KV_HEADS is 0 for apply_rope, which has only
    queries. The first ROTATED elements of a head turn. A lane holds two elements, which are a pair
    of the rotation or two of the others.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, HALF)
    D2: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    inside = lane < D2
    low, high = halves(lane, HEAD_DIM, ROTATED)
    is_query = head < NUM_Q_HEADS
    if NORM_Q:  # weights are loaded before the previous kernel has ended
        q_first = tl.load(q_weight_ptr + low, mask=inside, other=0.0).to(tl.float32)
        q_second = tl.load(q_weight_ptr + high, mask=inside, other=0.0).to(tl.float32)
    if NORM_K:
        k_first = tl.load(k_weight_ptr + low, mask=inside, other=0.0).to(tl.float32)
        k_second = tl.load(k_weight_ptr + high, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    start = token * X_TOKEN + (head * HEAD_DIM)[:, None]
    mask = (head < NUM_HEADS)[:, None] & inside[None, :]
    first = load_half(x_ptr, start + low[None, :], mask, plane, NUM_PARTIALS, dtype)
    second = load_half(x_ptr, start + high[None, :], mask, plane, NUM_PARTIALS, dtype)
    a, b = first, second
    if NORM_Q or NORM_K:
        squares = tl.sum(first * first + second * second, 1)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        norm_dtype: tl.constexpr = (q_weight_ptr if NORM_Q else k_weight_ptr).dtype.element_ty
        first_norm = (first * inverse).to(norm_dtype).to(tl.float32)
        second_norm = (second * inverse).to(norm_dtype).to(tl.float32)
        if NORM_Q:
            a = tl.where(is_query[:, None], first_norm * q_first[None, :], a)
            b = tl.where(is_query[:, None], second_norm * q_second[None, :], b)
        if NORM_K:
            a = tl.where(is_query[:, None], a, first_norm * k_first[None, :])
            b = tl.where(is_query[:, None], b, second_norm * k_second[None, :])
        a = a.to(dtype).to(tl.float32)
        b = b.to(dtype).to(tl.float32)
    if ROTATED > 0:
        R2: tl.constexpr = ROTATED // 2
        turns = lane < R2
        angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROTATED
        cos = tl.load(angles + lane, mask=turns, other=1.0).to(dtype).to(tl.float32)[None, :]
        sin = tl.load(angles + R2 + lane, mask=turns, other=0.0).to(dtype).to(tl.float32)[None, :]
        a, b = rotate(a, b, cos, sin, dtype)
    else:
        a, b = a.to(dtype), b.to(dtype)
    query = token * (NUM_Q_HEADS * HEAD_DIM) + (head * HEAD_DIM)[:, None]
    tl.store(out_ptr + query + low[None, :], a, mask=mask & is_query[:, None])
    tl.store(out_ptr + query + high[None, :], b, mask=mask & is_query[:, None])
    if NUM_KV_HEADS > 0:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        place = (slot // BLOCK_SIZE) * KV_BLOCK + (slot % BLOCK_SIZE) * KV_TOKEN
        is_value = head >= NUM_Q_HEADS + NUM_KV_HEADS
        stored = mask & (slot >= 0)
        kv_head = head - NUM_Q_HEADS
        key = place + (kv_head * KV_HEAD)[:, None]
        is_key = stored & (~is_query & ~is_value)[:, None]
        store_half(k_ptr, key + low[None, :], a, k_inverse_scale, is_key, FP8)
        store_half(k_ptr, key + high[None, :], b, k_inverse_scale, is_key, FP8)
        value = key - NUM_KV_HEADS * KV_HEAD
        is_value = stored & is_value[:, None]
        store_half(v_ptr, value + low[None, :], first, v_inverse_scale, is_value, FP8)
        store_half(v_ptr, value + high[None, :], second, v_inverse_scale, is_value, FP8)


def qk_norm_rope_store(
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
        qkv: [T, (Hq + 2 Hkv) D], queries then keys then values, or [P, T, (Hq + 2 Hkv) D]
            split-K partials, summed in fp32. The last dimension is contiguous.
        q_weight: [D] weight of the queries' norm, or None for no norm.
        k_weight: [D] weight of the keys' norm, or None for no norm.
        eps: epsilon of both norms.
        positions: [T] int32 or int64.
        cos_sin: [max_position, R] fp32, cosines then sines; None: nothing is rotated.
        kv: the layer's cache; its shape gives Hkv and D.
        slot_mapping: [T] int32 or int64; -1 for tokens that are not stored.
        num_q_heads: Hq.
        dtype: of the queries where qkv is partials; None: that of qkv.

    Returns:
        Queries [T, Hq, D].
    """
    num_kv_heads, head_dim = kv.k.shape[2:]
    num_tokens = qkv.shape[-2]
    assert qkv.stride(-1) == 1
    assert dtype is not None or qkv.dim() == 2, "partials do not show the queries' dtype"
    size = (num_tokens, num_q_heads, head_dim)
    out = torch.empty(size, dtype=dtype or qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return out
    num_heads = num_q_heads + 2 * num_kv_heads
    half = next_power_of_2(head_dim // 2)
    heads = min(ELEMENTS // (2 * half), next_power_of_2(num_heads))
    k, v = kv.stored()
    rope_store_kernel[num_tokens, cdiv(num_heads, heads)](
        qkv,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        positions,
        positions if cos_sin is None else cos_sin,
        slot_mapping,
        out,
        k,
        v,
        num_tokens,
        qkv.stride(0) if qkv.dim() == 3 else 0,
        eps,
        1.0 / kv.k_scale,
        1.0 / kv.v_scale,
        NUM_HEADS=num_heads,
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        X_TOKEN=qkv.stride(-2),
        BLOCK_SIZE=k.shape[1],
        KV_BLOCK=k.stride(0),
        KV_TOKEN=k.stride(1),
        KV_HEAD=k.stride(2),
        NUM_PARTIALS=qkv.shape[0] if qkv.dim() == 3 else 1,
        NORM_Q=q_weight is not None,
        NORM_K=k_weight is not None,
        ROTATED=0 if cos_sin is None else cos_sin.shape[1],
        FP8=kv.is_fp8,
        HEADS=heads,
        num_warps=4,
        **dependent_launch(qkv),
    )
    return out


def apply_rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of each head's first R elements (RoFormer; NeoX pairing).

    Args:
        x: [T, H, D], heads of a token contiguous.
        positions: [T] int32 or int64, each in [0, max_position).
        cos_sin: [max_position, R] fp32, cosines (R/2) then sines (R/2), R <= D and even.

    Returns:
        [T, H, D] in x's dtype.
    """
    num_tokens, num_heads, head_dim = x.shape
    assert x.stride()[1:] == (head_dim, 1)
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    half = next_power_of_2(head_dim // 2)
    heads = min(ELEMENTS // (2 * half), next_power_of_2(num_heads))
    rope_store_kernel[num_tokens, cdiv(num_heads, heads)](
        x,
        x,
        x,
        positions,
        cos_sin,
        positions,
        out,
        out,
        out,
        num_tokens,
        0,
        0.0,
        1.0,
        1.0,
        NUM_HEADS=num_heads,
        NUM_Q_HEADS=num_heads,
        NUM_KV_HEADS=0,
        HEAD_DIM=head_dim,
        HALF=half,
        X_TOKEN=x.stride(0),
        BLOCK_SIZE=1,
        KV_BLOCK=1,
        KV_TOKEN=1,
        KV_HEAD=1,
        NUM_PARTIALS=1,
        NORM_Q=False,
        NORM_K=False,
        ROTATED=cos_sin.shape[1],
        FP8=False,
        HEADS=heads,
        num_warps=4,
        **dependent_launch(x),
    )
    return out
