"""The inputs of a step: one program per row, then one per TOKENS tokens of prompts.

The first launch reads the number of computed tokens of each slot, and replaces it. It also reads
the token of each decode row, so that a step with only decode rows is one launch. The second launch
finds the row of a prompt's token by binary search, and its position from the row's new length. The
host never reads a length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv
from nv_kernels.launch.triton_previous import wait_for_previous
from nv_kernels.step.tables import FROM_SLOT, StepRows

if TYPE_CHECKING:
    from nv_kernels.step.tables import RowTables

ON_DEVICE = tl.constexpr(FROM_SLOT)
PROGRAM_TOKENS = 128

# Views of one packed tensor have any alignment, which must not compile another kernel.
ROW_VIEWS = ["token_ids_ptr", "slots_ptr", "starts_ptr", "query_start_ptr"]
TOKEN_VIEWS = ["token_ids_ptr", "slots_ptr", "query_start_ptr"]


@triton.jit
def read_parameters(
    row, slot, floats_ptr, integers_ptr,
    temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, seeds_ptr,
):  # fmt: skip
    """Copy the sampling parameters of a row's slot."""
    tl.store(temperature_ptr + row, tl.load(floats_ptr + slot * 3))
    tl.store(top_p_ptr + row, tl.load(floats_ptr + slot * 3 + 1))
    tl.store(min_p_ptr + row, tl.load(floats_ptr + slot * 3 + 2))
    tl.store(top_k_ptr + row, tl.load(integers_ptr + slot * 3).to(tl.int32))
    tl.store(seeds_ptr + row, tl.load(integers_ptr + slot * 3 + 1))


@triton.jit
def read_blocks(row, slot, used, table_ptr, tables_ptr, width, CHUNK: tl.constexpr):
    """Copy the first `used` entries of the block table of a row's slot."""
    for start in tl.range(0, used, CHUNK, num_stages=1):
        column = start + tl.arange(0, CHUNK)
        blocks = tl.load(table_ptr + slot * width + column, mask=column < used, other=0)
        tl.store(tables_ptr + row.to(tl.int64) * width + column, blocks, mask=column < used)


@triton.jit
def store_token(
    token, token_id, newest, position, block, is_stored,
    read_ids_ptr, positions_ptr, slot_mapping_ptr, BLOCK_SIZE: tl.constexpr, mask,
):  # fmt: skip
    """Store the inputs of a token; `block` holds its position."""
    tl.store(read_ids_ptr + token, tl.where(token_id == ON_DEVICE, newest, token_id), mask=mask)
    tl.store(positions_ptr + token, position, mask=mask)
    place = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slot_mapping_ptr + token, tl.where(is_stored, place, -1), mask=mask)


@triton.jit(
    do_not_specialize=["num_decodes", "width", "padding"],
    do_not_specialize_on_alignment=ROW_VIEWS,
)
def step_rows_kernel(
    token_ids_ptr, slots_ptr, starts_ptr, query_start_ptr, last_token_ptr, computed_ptr, table_ptr,
    floats_ptr, integers_ptr, read_ids_ptr, positions_ptr, slot_mapping_ptr,
    read_start_ptr, lengths_ptr, last_ptr, context_lens_ptr, tables_ptr,
    temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, seeds_ptr,
    num_decodes, width, padding, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i reads row i: its length, parameters and blocks, and its token if it decodes."""
    wait_for_previous(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    is_real = slot != padding
    first = tl.load(query_start_ptr + row)
    end = tl.load(query_start_ptr + row + 1)
    start = tl.load(starts_ptr + row)
    computed = tl.load(computed_ptr + slot).to(tl.int64)
    length = tl.where(start == ON_DEVICE, computed, start) + end - first
    if row == 0:
        tl.store(read_start_ptr, first.to(tl.int32))
    tl.store(read_start_ptr + row + 1, end.to(tl.int32))
    tl.store(lengths_ptr + row, length)
    tl.store(last_ptr + row, tl.maximum(end - 1, 0))
    tl.store(context_lens_ptr + row, tl.where(is_real, length, 0).to(tl.int32))
    tl.store(computed_ptr + slot, length.to(tl.int32), mask=is_real)
    if row < num_decodes:
        position = length - 1
        store_token(
            row, tl.load(token_ids_ptr + row), tl.load(last_token_ptr + slot), position,
            tl.load(table_ptr + slot * width + position // BLOCK_SIZE), is_real,
            read_ids_ptr, positions_ptr, slot_mapping_ptr, BLOCK_SIZE, None,
        )  # fmt: skip
    read_parameters(
        row, slot, floats_ptr, integers_ptr,
        temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, seeds_ptr,
    )  # fmt: skip
    used = tl.maximum(tl.cdiv(length, BLOCK_SIZE), 1)  # attention may prefetch the first one
    read_blocks(row, slot, used, table_ptr, tables_ptr, width, CHUNK)


@triton.jit
def find_rows(query_start_ptr, token, inside, num_rows):
    """Return the row of each token: the number of rows that end before it."""
    low = tl.zeros_like(token)
    high = low + num_rows
    unknown = num_rows  # a bound on high - low
    while unknown > 0:
        middle = (low + high) >> 1
        searched = inside & (low < high)
        end = tl.load(query_start_ptr + 1 + middle, mask=searched, other=0)
        low = tl.where(searched & (end <= token), middle + 1, low)
        high = tl.where(searched & (end > token), middle, high)
        unknown = unknown >> 1
    return low


@triton.jit(
    do_not_specialize=["num_decodes", "num_tokens", "num_rows", "width", "padding"],
    do_not_specialize_on_alignment=TOKEN_VIEWS,
)
def step_tokens_kernel(
    token_ids_ptr, slots_ptr, query_start_ptr, lengths_ptr, last_token_ptr, table_ptr,
    read_ids_ptr, positions_ptr, slot_mapping_ptr,
    num_decodes, num_tokens, num_rows, width, padding,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program reads TOKENS tokens of prompts; `step_rows_kernel` has written the lengths."""
    wait_for_previous(PDL)
    token = num_decodes + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < num_tokens
    row = find_rows(query_start_ptr, token, inside, num_rows)
    owned = inside & (row < num_rows)
    row = tl.where(owned, row, 0)
    slot = tl.load(slots_ptr + row)
    length = tl.load(lengths_ptr + row)
    end = tl.load(query_start_ptr + row + 1)
    position = tl.where(owned, length - end + token, 0)
    stored = owned & (slot != padding)
    block = tl.load(table_ptr + slot * width + position // BLOCK_SIZE, mask=stored, other=0)
    token_id = tl.load(token_ids_ptr + token, mask=inside, other=0)
    store_token(
        token, token_id, tl.load(last_token_ptr + slot), position, block, stored,
        read_ids_ptr, positions_ptr, slot_mapping_ptr, BLOCK_SIZE, inside,
    )  # fmt: skip


def step_rows(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    query_start: torch.Tensor,
    tables: RowTables,
    *,
    num_decodes: int,
    block_size: int,
    padding: int,
) -> StepRows:
    """Read the inputs of a step; see `nv_kernels.step.rows.step_rows`. Needs contiguous tables."""
    read, num_tokens, num_rows = _empty(token_ids, slots, tables), len(token_ids), len(slots)
    shape, options = (tables.block_table.shape[1], padding), dependent_launch(slots)
    of_tokens = (read.token_ids, read.positions, read.slot_mapping)
    step_rows_kernel[(num_rows,)](
        token_ids, slots, starts, query_start, tables.last_token, tables.computed,
        tables.block_table, tables.floats, tables.integers, *of_tokens,
        read.query_start, read.lengths, read.last, read.context_lens, read.block_tables,
        read.temperature, read.top_p, read.min_p, read.top_k, read.seeds,
        num_decodes, *shape, block_size, CHUNK=64, num_warps=1, **options,
    )  # fmt: skip
    if num_tokens > num_decodes:
        step_tokens_kernel[(cdiv(num_tokens - num_decodes, PROGRAM_TOKENS),)](
            token_ids, slots, query_start, read.lengths, tables.last_token, tables.block_table,
            *of_tokens, num_decodes, num_tokens, num_rows, *shape, block_size, PROGRAM_TOKENS,
            num_warps=4, **options,
        )  # fmt: skip
    return read


def _empty(token_ids: torch.Tensor, slots: torch.Tensor, tables: RowTables) -> StepRows:
    rows, tokens = slots.shape[0], token_ids.shape[0]

    def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=slots.device)

    return StepRows(
        token_ids=new(torch.int64, tokens),
        positions=new(torch.int64, tokens),
        slot_mapping=new(torch.int64, tokens),
        query_start=new(torch.int32, rows + 1),
        lengths=new(torch.int64, rows),
        last=new(torch.int64, rows),
        context_lens=new(torch.int32, rows),
        block_tables=new(torch.int32, rows, tables.block_table.shape[1]),
        temperature=new(torch.float32, rows),
        top_p=new(torch.float32, rows),
        min_p=new(torch.float32, rows),
        top_k=new(torch.int32, rows),
        seeds=new(torch.int64, rows),
    )
