"""A step's inputs from the rows that the device keeps, and its tokens back into them.

Owns the meaning of a padding row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.op import op
from nv_kernels.step.tables import FROM_SLOT, StepRows

if TYPE_CHECKING:
    from nv_kernels.step.tables import RowTables, TokenRing


@op(triton="nv_kernels.step.triton_rows")
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
    """Read the inputs of a step from its rows, and count its tokens as computed.

    Args:
        token_ids: [T] int64; FROM_SLOT stands for the newest token of its row's slot.
        slots: [S] int64, rows of `tables`; only the padding row may occur twice.
        starts: [S] int64 position of each row's first token; FROM_SLOT stands for the number of
            tokens that its slot has computed.
        query_start: [S+1] int64, from 0 on and never decreasing: row i has the tokens
            query_start[i] to query_start[i+1]. Tokens after the last row's end belong to no row.
        tables: the rows; `computed` of each becomes its length.
        num_decodes: number of first rows that have one token each.
        block_size: tokens per block.
        padding: the row of `tables` for padding. It has no context, stores nothing and is not
            changed.
    """
    del num_decodes  # the Triton version needs it, to save a launch
    real = slots != padding
    computed = tables.computed[slots].long()
    starts = torch.where(starts == FROM_SLOT, computed, starts)
    lengths = starts + query_start.diff()
    index = torch.arange(token_ids.shape[0], device=token_ids.device)
    row = torch.searchsorted(query_start[1:], index, right=True)  # [T]
    owned = row < slots.shape[0]
    row = torch.where(owned, row, 0)
    positions = torch.where(owned, (starts - query_start[:-1])[row] + index, 0)
    block_tables = tables.block_table[slots]
    blocks = block_tables[row, positions // block_size].long()
    places = blocks * block_size + positions % block_size
    tables.computed[slots] = torch.where(real, lengths, computed).int()
    return StepRows(
        torch.where(token_ids == FROM_SLOT, tables.last_token[slots[row]], token_ids),
        positions,
        torch.where(owned & real[row], places, -1),
        query_start.int(),
        lengths,
        (query_start[1:] - 1).clamp(min=0),
        torch.where(real, lengths, 0).int(),
        block_tables,
        *_parameters(slots, tables),
    )


def _parameters(slots: torch.Tensor, tables: RowTables) -> tuple[torch.Tensor, ...]:
    """Return temperature, top_p, min_p, top_k and seeds, [S] each."""
    temperature, top_p, min_p = tables.floats[slots].t().contiguous()
    top_k, seeds, _ = tables.integers[slots].t().contiguous()
    return temperature, top_p, min_p, top_k.int(), seeds


@op(triton="nv_kernels.step.triton_keep")
def keep_tokens(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
    ring: TokenRing | None = None,
) -> None:
    """Store the drawn tokens as each row's newest token, and send them to the host.

    Args:
        token_ids: [R] int64; -1 if no token could be drawn; the row then keeps token 0.
        slots: [R] int64 rows of `last_token`.
        last_token: [N] int64.
        ring: receives the step's tokens too, -1 included; its count grows by one.
    """
    last_token[slots] = token_ids.clamp(min=0)
    if ring is not None:
        entry = int(ring.count) % ring.entries.shape[0]
        ring.entries[entry, : token_ids.shape[0]] = token_ids
        ring.count.add_(1)
