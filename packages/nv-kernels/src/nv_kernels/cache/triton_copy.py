"""Copies the first tokens of cache blocks into other blocks: partial prefix hits and forks.

nv-cache decides what to copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.launch.triton_previous import wait_and_hold

if TYPE_CHECKING:
    from nv_kernels.cache.layout import KVCache

TOKENS = 16  # tokens per program; partial hits are multiples of 16


@triton.jit
def copy_blocks_kernel(
    k_ptr,
    v_ptr,
    sources_ptr,
    destinations_ptr,
    num_tokens_ptr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    KV_TOKEN: tl.constexpr,
    KV_HEAD: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program copies TOKENS tokens of one head of one pair. WIDTH: elements of a key."""
    wait_and_hold(PDL)
    pair = tl.program_id(0)
    count = tl.load(num_tokens_ptr + pair)
    start = tl.program_id(1) * TOKENS
    if start >= count:
        return
    token = start + tl.arange(0, TOKENS)
    lane = tl.arange(0, WIDE)
    source = tl.load(sources_ptr + pair).to(tl.int64) * KV_BLOCK
    destination = tl.load(destinations_ptr + pair).to(tl.int64) * KV_BLOCK
    spot = tl.program_id(2) * KV_HEAD + (token * KV_TOKEN)[:, None] + lane[None, :]
    mask = (token < tl.minimum(count, BLOCK_SIZE))[:, None] & (lane < WIDTH)[None, :]
    k = tl.load(k_ptr + source + spot, mask=mask)
    v = tl.load(v_ptr + source + spot, mask=mask)
    tl.store(k_ptr + destination + spot, k, mask=mask)
    tl.store(v_ptr + destination + spot, v, mask=mask)


def copy_blocks(
    kv: KVCache, sources: torch.Tensor, destinations: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    """Copy the first tokens of some blocks into others.

    Args:
        kv: the cache.
        sources: [N] int32 or int64 block numbers.
        destinations: [N] block numbers, none of them also a source, none twice.
        num_tokens: [N] tokens to copy, 0 to block_size; 0 copies nothing (padding).
    """
    assert kv.k.stride() == kv.v.stride()
    assert kv.k.stride(3) == 1
    k, v = kv.k.view(torch.int16), kv.v.view(torch.int16)  # any dtype, two bytes at a time
    _, block_size, num_kv_heads, width = k.shape
    num_pairs = sources.shape[0]
    if num_pairs == 0:
        return
    copy_blocks_kernel[num_pairs, cdiv(block_size, TOKENS), num_kv_heads](
        k,
        v,
        sources,
        destinations,
        num_tokens,
        WIDTH=width,
        WIDE=next_power_of_2(width),
        BLOCK_SIZE=block_size,
        KV_BLOCK=k.stride(0),
        KV_TOKEN=k.stride(1),
        KV_HEAD=k.stride(2),
        TOKENS=TOKENS,
        num_warps=4,
        **dependent_launch(k),
    )
