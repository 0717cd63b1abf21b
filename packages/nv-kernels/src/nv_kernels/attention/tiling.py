"""Cuts a step's queries and keys into tiles of fixed shape for batch-invariant attention on a CPU.

Owns the index tensors and masks of a step, made once and shared by all layers. Never touches keys
or values.

An item is a query tile of one sequence: one token, or up to TALL rows of a chunk. Its keys are
tiles of KEYS tokens at absolute positions, with a window from the tile of its first key on. Items
with the same number of rows form a batch, those with more tiles first. The tiles of a batch are
ordered by their place in the item, then by item, so that the tiles at one place are a slice and
belong to the first items.

A run is the largest number of tokens that lie together both in a block and in a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

import torch

from nv_kernels.linear.heights import TALL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nv_kernels.attention.metadata import AttentionMetadata, AttentionShape

KEYS = 128
MAX_SCORES = 2**20  # of a batch: they fit the core's cache


@dataclass(frozen=True)
class TileBatch:
    """Items that are computed together: I of them, of R rows each, with F tiles of keys in all.

    Attributes:
        num_rows: R.
        query_rows: [I, tokens] rows of q; an item with fewer tokens repeats its last row.
        kept: [N] places among the I * tokens that are not such repetitions.
        out_rows: [N] rows of the output that they write.
        item_of_tile: [F] the item that each tile belongs to.
        counts: for each place in an item, the number of items that have a tile there.
        runs: [F * Hkv * KEYS / run tokens] runs of the cache, each of one head.
        mask: [F, 1, R, KEYS], R 1 where items have one token: 0, or -inf for keys that the row must
            not see.
        absent: [A] rows among the gathered [F * Hkv * KEYS]: keys that no row of the item reads.
    """

    num_rows: int
    query_rows: torch.Tensor
    kept: torch.Tensor
    out_rows: torch.Tensor
    item_of_tile: torch.Tensor
    counts: tuple[int, ...]
    runs: torch.Tensor
    mask: torch.Tensor
    absent: torch.Tensor


@dataclass(frozen=True)
class _Item:
    row: int  # of the block table
    query: int  # first row of q
    num_tokens: int
    seen: int  # the position after the last token's
    first_key: int  # the first position that the first token reads

    @property
    def first_tile(self) -> int:
        return self.first_key // KEYS

    @property
    def num_tiles(self) -> int:
        return -(-self.seen // KEYS) - self.first_tile


def run_tokens(block_size: int) -> int:
    """Return the tokens of a run."""
    return gcd(block_size, KEYS)


def cut(
    metadata: AttentionMetadata, shape: AttentionShape, few_rows: int, window: int | None = None
) -> tuple[list[TileBatch], bool]:
    """Cut a step. Reads the metadata on the host.

    Args:
        metadata: the step's.
        shape: of attention.
        few_rows: rows of an item with one token; other items have TALL rows.
        window: keys that a token reads at most; None: all.

    Returns:
        The batches, and whether every query row belongs to one.
    """
    group = shape.num_q_heads // shape.num_kv_heads
    per_tile = max(1, TALL // group)
    items = list(_items(metadata, per_tile, window))
    single = [item for item in items if item.num_tokens == 1]
    longer = [item for item in items if item.num_tokens > 1]
    tables = metadata.block_tables
    batches = []
    for some, tokens, rows in (single, 1, few_rows), (longer, per_tile, TALL):
        parts = _parts(some, rows, shape)
        batches += [_batch(part, tokens, rows, tables, shape, window=window) for part in parts]
    return batches, sum(item.num_tokens for item in items) == int(metadata.query_start[-1])


def _items(metadata: AttentionMetadata, per_tile: int, window: int | None) -> Iterator[_Item]:
    starts = metadata.query_start.tolist()
    for row, context in enumerate(metadata.context_lens.tolist()):
        first, end = starts[row], starts[row + 1]
        if context == 0:
            continue
        for query in range(first, end, per_tile):
            stop = min(query + per_tile, end)
            seen = context - (end - stop)
            reach = seen if window is None else stop - query + window - 1
            yield _Item(row, query, stop - query, seen, max(0, seen - reach))


def _parts(items: list[_Item], num_rows: int, shape: AttentionShape) -> Iterator[list[_Item]]:
    """Cut items, most tiles first, into batches of bounded size."""
    room = max(1, MAX_SCORES // (shape.num_kv_heads * num_rows * KEYS))
    part: list[_Item] = []
    used = 0
    for item in sorted(items, key=lambda item: -item.num_tiles):
        if part and used + item.num_tiles > room:
            yield part
            part, used = [], 0
        part.append(item)
        used += item.num_tiles
    if part:
        yield part


def _batch(
    items: list[_Item],
    tokens: int,
    num_rows: int,
    tables: torch.Tensor,
    shape: AttentionShape,
    *,
    window: int | None,
) -> TileBatch:
    device = tables.device
    columns = [(i.query, i.num_tokens, i.seen, i.first_key, i.row) for i in items]
    query, used, seen, first_key, row = torch.tensor(columns, device=device).unbind(1)  # [I] each
    token = torch.arange(tokens, device=device)
    query_rows = query[:, None] + torch.minimum(token, used[:, None] - 1)  # [I, tokens]
    kept = (token < used[:, None]).flatten().nonzero()[:, 0]
    num_tiles = (seen + KEYS - 1) // KEYS - first_key // KEYS
    places = torch.arange(items[0].num_tiles, device=device)
    there = places[:, None] < num_tiles  # [places, I]
    place, item = there.nonzero().unbind(1)  # [F] each, ordered by place, then item
    tile = first_key[item] // KEYS + place
    keys = (tile * KEYS)[:, None] + torch.arange(KEYS, device=device)  # [F, KEYS]
    unread = (keys >= seen[item, None]) | (keys < first_key[item, None])
    absent = unread[:, None].expand(-1, shape.num_kv_heads, -1).flatten().nonzero()[:, 0]
    group = shape.num_q_heads // shape.num_kv_heads
    rows = torch.arange(num_rows if tokens > 1 else 1, device=device)
    token_of_row = torch.minimum(rows // group, used[:, None] - 1)  # [I, R]
    visible = ((seen - used)[:, None] + token_of_row + 1)[item]  # [F, R]
    mask = torch.zeros(keys.shape[0], 1, rows.shape[0], KEYS, device=device)
    hidden = keys[:, None, None] >= visible[:, None, :, None]
    if window is not None:
        hidden |= keys[:, None, None] < visible[:, None, :, None] - window
    mask.masked_fill_(hidden, float("-inf"))
    return TileBatch(
        num_rows=num_rows,
        query_rows=query_rows,
        kept=kept,
        out_rows=query_rows.flatten()[kept],
        item_of_tile=item,
        counts=tuple(there.sum(1).tolist()),
        runs=_runs(tile, row[item], seen[item], tables, shape, first_key=first_key[item]),
        mask=mask,
        absent=absent,
    )


def _runs(
    tile: torch.Tensor,
    row: torch.Tensor,
    seen: torch.Tensor,
    tables: torch.Tensor,
    shape: AttentionShape,
    *,
    first_key: torch.Tensor,
) -> torch.Tensor:
    """Number the runs of tiles [F]: tile by tile, then head by head.

    A run without a key of the item is replaced by the run of the item's first key, so that blocks
    of other sequences are never read. Only the rest of the first and last keys' own runs is.
    """
    size = run_tokens(shape.block_size)
    device = tables.device
    position = tile[:, None] * KEYS + torch.arange(0, KEYS, size, device=device)  # [F, runs]
    own = (first_key // size * size)[:, None]
    position = torch.where((position >= own) & (position < seen[:, None]), position, own)
    block = tables[row[:, None], position // shape.block_size].long()
    head = torch.arange(shape.num_kv_heads, device=device)[:, None]
    per_block = shape.block_size // size
    within = (position % shape.block_size) // size
    first = (block[:, None] * shape.num_kv_heads + head) * per_block  # [F, Hkv, runs]
    return (first + within[:, None]).flatten()
