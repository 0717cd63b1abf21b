"""A decode step's inputs from the rows that the device keeps, and its tokens back into them.

Owns what a padding row is. Never draws, never decides which rows run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.rows import DecodeRows

if TYPE_CHECKING:
    from nv_kernels.rows import RowTables, TokenRing


def decode_rows(
    slots: torch.Tensor, tables: RowTables, block_size: int, padding: int
) -> DecodeRows:
    """Read what a decode step needs, and count its tokens as computed.

    Args:
        slots: [S] int64, the rows of `tables` that decode, none twice but the padding.
        tables: the rows; `computed` of each grows by one.
        block_size: tokens a block.
        padding: a row that stands for nobody: it has no context, stores nothing and stays as it is.
    """
    real = slots != padding
    positions = tables.computed[slots].long()
    lengths = positions + 1
    block_tables = tables.block_table[slots]
    blocks = block_tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
    slot_mapping = torch.where(real, blocks * block_size + positions % block_size, -1)
    context_lens = torch.where(real, lengths, 0).int()
    tables.computed[slots] = torch.where(real, lengths, positions).int()
    temperature, top_p, min_p = tables.floats[slots].t().contiguous()
    top_k, seeds, _ = tables.integers[slots].t().contiguous()
    return DecodeRows(
        tables.last_token[slots],
        positions,
        lengths,
        slot_mapping,
        context_lens,
        block_tables,
        temperature,
        top_p,
        min_p,
        top_k.int(),
        seeds,
    )


def keep_tokens(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
    ring: TokenRing | None = None,
) -> None:
    """Remember what was drawn as each row's newest token, and send it on its way to the host.

    Args:
        token_ids: [R] int64.
        slots: [R] int64 rows of `last_token`.
        last_token: [N] int64.
        ring: where the step's tokens go besides; its count grows by one.
    """
    last_token[slots] = token_ids
    if ring is not None:
        entry = int(ring.count) % ring.entries.shape[0]
        ring.entries[entry, : token_ids.shape[0]] = token_ids
        ring.count.add_(1)
