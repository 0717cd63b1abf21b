"""Writes new tokens' keys and values into the paged cache.

Owns the store, which the fused kernel of `triton_rope` uses too, and the rounding to e4m3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.launch.triton_previous import wait_and_hold

if TYPE_CHECKING:
    import torch

    from nv_kernels.cache.layout import KVCache

ELEMENTS = 2048  # elements per program: two times 16 bytes of 16-bit elements per thread


@triton.jit
def encode_fp8(x):
    """Round fp32 to e4m3 bytes, to nearest even, clamped to +-448; integer arithmetic, any card.

    A factor of 2**-120 maps e4m3's exponents to fp32's lowest ones, and subnormals to subnormals,
    so that one rounding of the bits is right for both.
    """
    clamped = tl.minimum(tl.maximum(x, -448.0), 448.0)
    bits = (clamped * 7.52316384526264e-37).to(tl.uint32, bitcast=True)  # 2**-120
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_half(ptr, spot, x, inverse_scale, mask, FP8: tl.constexpr):
    """Store keys or values, as bytes of e4m3 where FP8."""
    if FP8:
        tl.store(ptr + spot, encode_fp8(x.to(tl.float32) * inverse_scale), mask=mask)
    else:
        tl.store(ptr + spot, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_kv_kernel(
    k_ptr,
    v_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_inverse_scale,
    v_inverse_scale,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    KV_TOKEN: tl.constexpr,
    KV_HEAD: tl.constexpr,
    FP8: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program stores HEADS heads of one token."""
    wait_and_hold(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, DIM)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    mask = (head < NUM_KV_HEADS)[:, None] & (lane < HEAD_DIM)[None, :] & (slot >= 0)
    k_spot = token * K_TOKEN + (head * K_HEAD)[:, None] + lane[None, :]
    v_spot = token * V_TOKEN + (head * V_HEAD)[:, None] + lane[None, :]
    k = tl.load(k_ptr + k_spot, mask=mask, other=0.0)
    v = tl.load(v_ptr + v_spot, mask=mask, other=0.0)
    place = (slot // BLOCK_SIZE) * KV_BLOCK + (slot % BLOCK_SIZE) * KV_TOKEN
    target = place + (head * KV_HEAD)[:, None] + lane[None, :]
    store_half(k_cache_ptr, target, k, k_inverse_scale, mask, FP8)
    store_half(v_cache_ptr, target, v, v_inverse_scale, mask, FP8)


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: KVCache, slot_mapping: torch.Tensor) -> None:
    """Write each token's key and value into its slot.

    Args:
        k: [T, Hkv, D], D contiguous.
        v: [T, Hkv, D], D contiguous.
        kv: the cache to write to. An fp8 cache gets value / scale, clamped to +-448.
        slot_mapping: [T] int32 or int64, block * block_size + offset; -1 for tokens that are not
            stored.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    dim = next_power_of_2(head_dim)
    heads = min(ELEMENTS // dim, next_power_of_2(num_kv_heads))
    k_cache, v_cache = kv.stored()
    store_kv_kernel[num_tokens, cdiv(num_kv_heads, heads)](
        k,
        v,
        slot_mapping,
        k_cache,
        v_cache,
        1.0 / kv.k_scale,
        1.0 / kv.v_scale,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        DIM=dim,
        K_TOKEN=k.stride(0),
        K_HEAD=k.stride(1),
        V_TOKEN=v.stride(0),
        V_HEAD=v.stride(1),
        BLOCK_SIZE=k_cache.shape[1],
        KV_BLOCK=k_cache.stride(0),
        KV_TOKEN=k_cache.stride(1),
        KV_HEAD=k_cache.stride(2),
        FP8=kv.is_fp8,
        HEADS=heads,
        num_warps=4,
        **dependent_launch(k),
    )
