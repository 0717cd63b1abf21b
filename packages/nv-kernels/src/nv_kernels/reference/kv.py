"""Writes into the paged KV cache: new tokens, and copies between blocks.

Owns what a slot number means. Never reads for attention, never picks a slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nv_kernels.kv import KVCache

FP8_MAX = 448.0  # the largest finite e4m3 value; torch's cast gives NaN beyond it


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: KVCache, slot_mapping: torch.Tensor) -> None:
    """Write each token's key and value into its slot.

    Args:
        k: [T, Hkv, D].
        v: [T, Hkv, D].
        kv: the cache to write to. An fp8 cache gets value / scale, clamped to +-448.
        slot_mapping: [T] int32 or int64, block * block_size + offset; -1: not stored. No slot
            appears twice.
    """
    if slot_mapping.numel() and int(slot_mapping.min()) < 0:
        keep = slot_mapping >= 0
        k, v, slot_mapping = k[keep], v[keep], slot_mapping[keep]
    _put(kv.k, slot_mapping.long(), _encode(k, kv.k.dtype, kv.k_scale))
    _put(kv.v, slot_mapping.long(), _encode(v, kv.v.dtype, kv.v_scale))


def copy_blocks(
    kv: KVCache, sources: torch.Tensor, destinations: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    """Copy the first tokens of some blocks into others.

    Args:
        kv: the cache.
        sources: [N] int32 or int64 block numbers.
        destinations: [N] block numbers, none of them also a source, none twice.
        num_tokens: [N] tokens to copy, 0 to block_size.
    """
    for source, destination, count in zip(
        sources.tolist(), destinations.tolist(), num_tokens.tolist(), strict=True
    ):
        kv.k[destination, :count].copy_(kv.k[source, :count])
        kv.v[destination, :count].copy_(kv.v[source, :count])


def _put(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write values [T, Hkv, D] to slots of a cache [num_blocks, block_size, Hkv, D]."""
    block_size, cache, values = cache.shape[1], _raw(cache), _raw(values)
    if cache.stride(0) == block_size * cache.stride(1):  # tokens follow one another
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, values)
    else:
        cache.index_put_((slots // block_size, slots % block_size), values)


def _encode(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    if dtype == torch.float8_e4m3fn:
        x = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX)
    return x.to(dtype)


def _raw(x: torch.Tensor) -> torch.Tensor:
    """View fp8 as bytes: torch indexes those on every device."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
