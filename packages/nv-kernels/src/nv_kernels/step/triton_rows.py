"""The two ends of a decode step in one launch each.

Owns the kernels of `nv_kernels.step.rows`. Never reads a length on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.triton_previous import wait_for_previous
from nv_kernels.step.tables import DecodeRows

if TYPE_CHECKING:
    from nv_kernels.step.tables import RowTables, TokenRing


@triton.jit
def read_parameters(
    row, slot, floats_ptr, integers_ptr,
    temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, seeds_ptr,
):  # fmt: skip
    """Give a row the sampling parameters of its slot."""
    tl.store(temperature_ptr + row, tl.load(floats_ptr + slot * 3))
    tl.store(top_p_ptr + row, tl.load(floats_ptr + slot * 3 + 1))
    tl.store(min_p_ptr + row, tl.load(floats_ptr + slot * 3 + 2))
    tl.store(top_k_ptr + row, tl.load(integers_ptr + slot * 3).to(tl.int32))
    tl.store(seeds_ptr + row, tl.load(integers_ptr + slot * 3 + 1))


@triton.jit
def read_blocks(row, slot, used, table_ptr, tables_ptr, width, CHUNK: tl.constexpr):
    """Give a row the first `used` entries of the block table of its slot."""
    for start in tl.range(0, used, CHUNK, num_stages=1):
        column = start + tl.arange(0, CHUNK)
        blocks = tl.load(table_ptr + slot * width + column, mask=column < used, other=0)
        tl.store(tables_ptr + row.to(tl.int64) * width + column, blocks, mask=column < used)


@triton.jit(do_not_specialize=["width", "padding"])
def decode_rows_kernel(
    slots_ptr, last_token_ptr, computed_ptr, table_ptr, floats_ptr, integers_ptr,
    token_ids_ptr, positions_ptr, lengths_ptr, slot_mapping_ptr, context_lens_ptr, tables_ptr,
    temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, seeds_ptr,
    width, padding, PAGE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Let program i read row i: its state, its sampling parameters, the blocks in use."""
    wait_for_previous(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    is_real = slot != padding
    position = tl.load(computed_ptr + slot)
    block = tl.load(table_ptr + slot * width + position // PAGE).to(tl.int64)
    tl.store(token_ids_ptr + row, tl.load(last_token_ptr + slot))
    tl.store(positions_ptr + row, position.to(tl.int64))
    tl.store(lengths_ptr + row, position.to(tl.int64) + 1)
    tl.store(slot_mapping_ptr + row, tl.where(is_real, block * PAGE + position % PAGE, -1))
    tl.store(context_lens_ptr + row, tl.where(is_real, position + 1, 0))
    tl.store(computed_ptr + slot, position + 1, mask=is_real)
    read_parameters(
        row, slot, floats_ptr, integers_ptr,
        temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, seeds_ptr,
    )  # fmt: skip
    read_blocks(row, slot, position // PAGE + 1, table_ptr, tables_ptr, width, CHUNK)


def decode_rows(
    slots: torch.Tensor, tables: RowTables, block_size: int, padding: int
) -> DecodeRows:
    """Read what a decode step needs, and count its tokens as computed.

    Args:
        slots: [S] int64, the rows of `tables` that decode, none twice but the padding.
        tables: the rows, contiguous; `computed` of each grows by one.
        block_size: tokens a block.
        padding: a row that stands for nobody.
    """
    rows, width = slots.shape[0], tables.block_table.shape[1]

    def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=slots.device)

    read = DecodeRows(
        token_ids=new(torch.int64),
        positions=new(torch.int64),
        lengths=new(torch.int64),
        slot_mapping=new(torch.int64),
        context_lens=new(torch.int32),
        block_tables=new(torch.int32, width),
        temperature=new(torch.float32),
        top_p=new(torch.float32),
        min_p=new(torch.float32),
        top_k=new(torch.int32),
        seeds=new(torch.int64),
    )
    if rows:
        decode_rows_kernel[(rows,)](
            slots, tables.last_token, tables.computed, tables.block_table, tables.floats,
            tables.integers, *read, width, padding, block_size, CHUNK=64, num_warps=1,
            **dependent_launch(slots),
        )  # fmt: skip
    return read


@triton.jit(do_not_specialize=["num_rows", "num_entries", "width"])
def keep_tokens_kernel(
    token_ids_ptr, slots_ptr, last_token_ptr, entries_ptr, count_ptr,
    num_rows, num_entries, width, RING: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: it alone counts the step."""
    wait_for_previous(PDL)
    entry = entries_ptr
    if RING:
        count = tl.load(count_ptr)
        entry = entries_ptr + (count % num_entries) * width
        tl.store(count_ptr, count + 1)
    for start in tl.range(0, num_rows, CHUNK, num_stages=1):
        row = start + tl.arange(0, CHUNK)
        inside = row < num_rows
        token = tl.load(token_ids_ptr + row, mask=inside, other=0)
        slot = tl.load(slots_ptr + row, mask=inside, other=0)
        tl.store(last_token_ptr + slot, tl.maximum(token, 0), mask=inside)
        if RING:
            tl.store(entry + row, token, mask=inside)


def keep_tokens(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
    ring: TokenRing | None = None,
) -> None:
    """Remember what was drawn as each row's newest token, and send it on its way to the host.

    Args:
        token_ids: [R] int64; -1 where nothing could be drawn: the row keeps token 0 then.
        slots: [R] int64 rows of `last_token`.
        last_token: [N] int64.
        ring: where the step's tokens go besides, -1 as it is; its count grows by one.
    """
    entries, count = (ring.entries, ring.count) if ring is not None else (token_ids, token_ids)
    sizes = tuple(ring.entries.shape) if ring is not None else (1, 1)
    keep_tokens_kernel[(1,)](
        token_ids, slots, last_token, entries, count, token_ids.shape[0], *sizes,
        RING=ring is not None, CHUNK=512, num_warps=4, **dependent_launch(token_ids),
    )  # fmt: skip
