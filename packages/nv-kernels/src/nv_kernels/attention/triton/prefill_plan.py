"""Lists the query tiles of a step's chunk rows, longest first, on the device, for all layers.

Owns the record of a tile. Lengths stay on the device.

Row 0 of the records is a header: number of tiles, query rows in use, and two counters for the
kernel whose programs take tiles from a queue (taken, programs done; 0 between launches). A record
is eight int32: row of the block table, first query row of the tile, its query rows (tokens), keys
that its first token sees, the row's context length, three spare.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nv_kernels.launch.triton_previous import wait_for_previous

RECORD = 8


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def prefill_plan_kernel(
    query_start_ptr,
    context_lens_ptr,
    records_ptr,
    first_row,
    num_rows,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program i ranks the tiles of chunk row i among all tiles by the keys they see.

    Rows are first_row to first_row + num_rows - 1; ROWS is a power of two, at least num_rows. A
    tile holds TOKENS query tokens. There is no sort: a tile's rank is a sum over rows, in closed
    form, of the number of their tiles that see more keys. CHUNK tiles are ranked at a time.
    """
    wait_for_previous(PDL)
    own = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    present = rows < num_rows
    start = tl.load(query_start_ptr + first_row + rows, mask=present, other=0)
    end = tl.load(query_start_ptr + first_row + rows + 1, mask=present, other=0)
    context = tl.load(context_lens_ptr + first_row + rows, mask=present, other=0)
    tiles = tl.where(context > 0, tl.cdiv(end - start, TOKENS), 0)
    cached = context - (end - start)  # keys before the row's first query

    own_start = tl.load(query_start_ptr + first_row + own)
    own_end = tl.load(query_start_ptr + first_row + own + 1)
    own_context = tl.load(context_lens_ptr + first_row + own)
    own_tiles = tl.where(own_context > 0, tl.cdiv(own_end - own_start, TOKENS), 0)
    own_cached = own_context - (own_end - own_start)
    if own == 0:
        tl.store(records_ptr, tl.sum(tiles, 0))
        tl.store(records_ptr + 1, tl.load(query_start_ptr + first_row + num_rows))
        tl.store(records_ptr + 2, 0)
        tl.store(records_ptr + 3, 0)
    for first in tl.range(0, own_tiles, CHUNK, num_stages=1):
        tile = first + tl.arange(0, CHUNK)
        seen = own_cached + (tile + 1) * TOKENS  # as if the last tile were full
        ahead = tl.maximum(seen[:, None] - cached[None, :], 0)  # [CHUNK, ROWS]
        longer = tiles[None, :] - tl.minimum(ahead // TOKENS, tiles[None, :])
        equal = (ahead % TOKENS == 0) & (ahead > 0) & (ahead // TOKENS <= tiles[None, :])
        longer += (equal & (rows < own)[None, :]).to(tl.int32)
        rank = tl.sum(longer, 1)
        query = own_start + tile * TOKENS
        record = records_ptr + (rank + 1) * 8
        mine = tile < own_tiles
        tl.store(record, first_row + own + tl.zeros_like(tile), mask=mine)
        tl.store(record + 1, query, mask=mine)
        tl.store(record + 2, tl.minimum(own_end - query, TOKENS), mask=mine)
        tl.store(record + 3, own_cached + tile * TOKENS + 1, mask=mine)
        tl.store(record + 4, own_context + tl.zeros_like(tile), mask=mine)
