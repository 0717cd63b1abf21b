"""Writes of new tokens into the paged KV cache.

A slot number is block * block_size + offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nv_kernels.cache.layout import as_bytes
from nv_kernels.op import op

if TYPE_CHECKING:
    import torch

    from nv_kernels.cache.layout import KVCache

FP8_MAX = 448.0  # the largest finite e4m3 value; torch's cast gives NaN beyond it


@op(triton="nv_kernels.cache.triton_write")
def store_kv(k: torch.Tensor, v: torch.Tensor, kv: KVCache, slot_mapping: torch.Tensor) -> None:
    """Write each token's key and value into its slot.

    Args:
        k: [T, Hkv, D].
        v: [T, Hkv, D].
        kv: the cache to write to. An fp8 cache gets value / scale, clamped to +-448.
        slot_mapping: [T] int32 or int64, block * block_size + offset; -1 for tokens that are
            not stored. A slot appears at most once.
    """
    if slot_mapping.numel() and int(slot_mapping.min()) < 0:
        keep = slot_mapping >= 0
        k, v, slot_mapping = k[keep], v[keep], slot_mapping[keep]
    _put(kv.k, slot_mapping.long(), _encode(k, kv, kv.k_scale))
    _put(kv.v, slot_mapping.long(), _encode(v, kv, kv.v_scale))


def _put(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write values [T, Hkv, D] to slots of a cache [num_blocks, block_size, Hkv, D]."""
    block_size, cache, values = cache.shape[1], as_bytes(cache), as_bytes(values)
    if cache.stride(0) == block_size * cache.stride(1):  # tokens are adjacent across blocks
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, values)
    else:
        cache.index_put_((slots // block_size, slots % block_size), values)


def _encode(x: torch.Tensor, kv: KVCache, scale: float) -> torch.Tensor:
    if kv.is_fp8:
        x = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX)
    return x.to(kv.k.dtype)
