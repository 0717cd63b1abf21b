"""Copies the e4m3 keys and values that a step's chunk rows see into 16-bit blocks.

The kernel for 16-bit caches then reads these blocks. This costs less than converting each tile once
per query tile.

A value is written as its fp8 value times 2**-8 (see nv_kernels.cache.triton_fp8), which both
16-bit dtypes hold exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from nv_kernels.cache.triton_fp8 import even_fp8, odd_fp8
from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.launch.triton_previous import wait_for_previous

if TYPE_CHECKING:
    import torch

    from nv_kernels.attention.metadata import AttentionMetadata

TILE = 64  # tokens per program


@triton.jit(do_not_specialize=["table_stride", "first_row", "width"])
def widen_kv_kernel(
    k_ptr,
    v_ptr,
    block_tables_ptr,
    context_lens_ptr,
    out_k_ptr,
    out_v_ptr,
    out_tables_ptr,
    table_stride,
    first_row,
    width,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    KV_TOKEN: tl.constexpr,
    KV_HEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program copies TILE tokens of one (row, head), and writes the new block's number.

    k, v: int16 pairs, strides in pairs; out [rows * width, Hkv, BLOCK_SIZE, D]. PAIRS: D / 2
    rounded up to a power of two.
    """
    wait_for_previous(PDL)
    row = tl.program_id(0)
    first = tl.program_id(1) * TILE
    head = tl.program_id(2)
    length = tl.load(context_lens_ptr + first_row + row)
    if first >= length:
        return
    index = first // BLOCK_SIZE
    if head == 0:
        entry = out_tables_ptr + (first_row + row) * width + index
        tl.store(entry, row * width + index)
    table = block_tables_ptr + (first_row + row).to(tl.int64) * table_stride
    block = tl.load(table + index).to(tl.int64)
    token = first % BLOCK_SIZE + tl.arange(0, TILE)
    pair = tl.arange(0, PAIRS)
    D: tl.constexpr = HEAD_DIM
    mask = (first + tl.arange(0, TILE) < length)[:, None] & (pair < D // 2)[None, :]
    spot = block * KV_BLOCK + head * KV_HEAD + (token * KV_TOKEN)[:, None] + pair[None, :]
    column = tl.arange(0, 2 * PAIRS)
    keep = (first + tl.arange(0, TILE) < length)[:, None] & (column < D)[None, :]
    to = (row * width + index).to(tl.int64) * (NUM_KV_HEADS * BLOCK_SIZE * D) + head * (
        BLOCK_SIZE * D
    )
    to = to + (token * D)[:, None] + column[None, :]
    dtype: tl.constexpr = out_k_ptr.dtype.element_ty
    k = tl.load(k_ptr + spot, mask=mask, other=0)
    tl.store(out_k_ptr + to, tl.interleave(even_fp8(k), odd_fp8(k)).to(dtype), mask=keep)
    v = tl.load(v_ptr + spot, mask=mask, other=0)
    tl.store(out_v_ptr + to, tl.interleave(even_fp8(v), odd_fp8(v)).to(dtype), mask=keep)


def widen_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    metadata: AttentionMetadata,
    out_k: torch.Tensor,
    out_v: torch.Tensor,
    out_tables: torch.Tensor,
) -> None:
    """Copy the keys and values that the rows after the first num_decodes see.

    Args:
        k: [num_blocks, block_size, Hkv, D / 2] int16 pairs of e4m3; block_size is a multiple of 64.
        v: as `k`, with equal strides.
        metadata: the step's.
        out_k: [chunk rows * width, Hkv, block_size, D] bf16 or fp16, contiguous. Tokens past a
            row's context are not written.
        out_v: as `out_k`.
        out_tables: [S, width] int32, contiguous: the block tables of the copy. Entries past a
            row's last block, and decode rows, are not written.
    """
    num_rows = metadata.context_lens.shape[0] - metadata.num_decodes
    _, num_kv_heads, block_size, head_dim = out_k.shape
    width = out_tables.shape[1]
    assert block_size % TILE == 0
    widen_kv_kernel[num_rows, cdiv(metadata.max_context_len, TILE), num_kv_heads](
        k,
        v,
        metadata.block_tables,
        metadata.context_lens,
        out_k,
        out_v,
        out_tables,
        metadata.block_tables.stride(0),
        metadata.num_decodes,
        width,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAIRS=next_power_of_2(head_dim // 2),
        BLOCK_SIZE=block_size,
        TILE=TILE,
        KV_BLOCK=k.stride(0),
        KV_TOKEN=k.stride(1),
        KV_HEAD=k.stride(2),
        num_warps=4,
        **dependent_launch(metadata.context_lens),
    )
