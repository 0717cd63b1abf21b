"""The inputs of a step with prompts in two launches: a program a row, then a program some tokens.

The first alone reads what a slot has computed, and replaces it; the second finds the row of a token
by binary search, and its position from the row's new length.

Owns the kernels of `nv_kernels.reference.prompt_rows`. Never reads a length on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv
from nv_kernels.launch.triton_previous import wait_for_previous
from nv_kernels.step.tables import FROM_SLOT, PromptRows
from nv_kernels.step.triton_rows import read_blocks, read_parameters

if TYPE_CHECKING:
    from nv_kernels.step.tables import RowTables

ON_DEVICE = tl.constexpr(FROM_SLOT)
BLOCK = 128  # tokens of a program

# Views of one packed tensor may begin anywhere: that must not be another kernel to compile.
ROW_VIEWS = ["slots_ptr", "starts_ptr", "query_start_ptr", "last_ptr"]
TOKEN_VIEWS = ["token_ids_ptr", "slots_ptr", "query_start_ptr", "read_ids_ptr"]


@triton.jit(do_not_specialize=["width", "padding"], do_not_specialize_on_alignment=ROW_VIEWS)
def prompt_rows_kernel(
    slots_ptr, starts_ptr, query_start_ptr, computed_ptr, table_ptr, floats_ptr, integers_ptr,
    read_start_ptr, lengths_ptr, last_ptr, context_lens_ptr, tables_ptr,
    temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, seeds_ptr,
    width, padding, PAGE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Let program i read row i: its length, its sampling parameters, the blocks in use."""
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
    read_parameters(
        row, slot, floats_ptr, integers_ptr,
        temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, seeds_ptr,
    )  # fmt: skip
    used = tl.maximum(tl.cdiv(length, PAGE), 1)  # what a kernel fetches too early is a block
    read_blocks(row, slot, used, table_ptr, tables_ptr, width, CHUNK)


@triton.jit
def find_rows(query_start_ptr, token, inside, num_rows):
    """Count, for each token, the rows that end before it: the number of its row."""
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
    do_not_specialize=["num_tokens", "num_rows", "width", "padding"],
    do_not_specialize_on_alignment=TOKEN_VIEWS,
)
def prompt_tokens_kernel(
    token_ids_ptr, slots_ptr, query_start_ptr, lengths_ptr, last_token_ptr, table_ptr,
    read_ids_ptr, positions_ptr, slot_mapping_ptr, num_tokens, num_rows, width, padding,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Let a program read BLOCK tokens, after `prompt_rows_kernel` has found the rows' lengths."""
    wait_for_previous(PDL)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    row = find_rows(query_start_ptr, token, inside, num_rows)
    owned = inside & (row < num_rows)
    row = tl.where(owned, row, 0)
    slot = tl.load(slots_ptr + row)
    length = tl.load(lengths_ptr + row)
    end = tl.load(query_start_ptr + row + 1)
    position = tl.where(owned, length - end + token, 0)
    stored = owned & (slot != padding)
    block = tl.load(table_ptr + slot * width + position // PAGE, mask=stored, other=0).to(tl.int64)
    token_id = tl.load(token_ids_ptr + token, mask=inside, other=0)
    newest = tl.load(last_token_ptr + slot)
    tl.store(read_ids_ptr + token, tl.where(token_id == ON_DEVICE, newest, token_id), mask=inside)
    tl.store(positions_ptr + token, position, mask=inside)
    place = tl.where(stored, block * PAGE + position % PAGE, -1)
    tl.store(slot_mapping_ptr + token, place, mask=inside)


def prompt_rows(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    query_start: torch.Tensor,
    tables: RowTables,
    *,
    block_size: int,
    padding: int,
) -> PromptRows:
    """Read what a step with prompts needs, and count its tokens as computed.

    Args:
        token_ids: [T] int64; FROM_SLOT: the newest token of its row's slot.
        slots: [S] int64, the rows of `tables` that compute, none twice but the padding.
        starts: [S] int64 position of each row's first token; FROM_SLOT: as many as its slot has
            computed.
        query_start: [S+1] int64 from 0 on, never falling.
        tables: the rows, contiguous; `computed` of each becomes its length.
        block_size: tokens a block.
        padding: a row that stands for nobody.
    """
    read = _empty(token_ids, slots, tables)
    shape = (tables.block_table.shape[1], padding)
    options = dependent_launch(slots)
    of_rows = (
        read.query_start, read.lengths, read.last, read.context_lens, read.block_tables,
        read.temperature, read.top_p, read.min_p, read.top_k, read.seeds,
    )  # fmt: skip
    prompt_rows_kernel[(slots.shape[0],)](
        slots, starts, query_start, tables.computed, tables.block_table, tables.floats,
        tables.integers, *of_rows, *shape, block_size, CHUNK=64, num_warps=1, **options,
    )  # fmt: skip
    prompt_tokens_kernel[(cdiv(token_ids.shape[0], BLOCK),)](
        token_ids, slots, query_start, read.lengths, tables.last_token, tables.block_table,
        read.token_ids, read.positions, read.slot_mapping, token_ids.shape[0], slots.shape[0],
        *shape, block_size, BLOCK, num_warps=4, **options,
    )  # fmt: skip
    return read


def _empty(token_ids: torch.Tensor, slots: torch.Tensor, tables: RowTables) -> PromptRows:
    """Room for the result. What torch takes as an index is one even where nothing is launched."""
    rows, tokens = slots.shape[0], token_ids.shape[0]
    last, read_ids = torch.split(token_ids.new_zeros(rows + tokens), [rows, tokens])

    def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=slots.device)

    return PromptRows(
        token_ids=read_ids,
        positions=new(torch.int64, tokens),
        slot_mapping=new(torch.int64, tokens),
        query_start=new(torch.int32, rows + 1),
        lengths=new(torch.int64, rows),
        last=last,
        context_lens=new(torch.int32, rows),
        block_tables=new(torch.int32, rows, tables.block_table.shape[1]),
        temperature=new(torch.float32, rows),
        top_p=new(torch.float32, rows),
        min_p=new(torch.float32, rows),
        top_k=new(torch.int32, rows),
        seeds=new(torch.int64, rows),
    )
