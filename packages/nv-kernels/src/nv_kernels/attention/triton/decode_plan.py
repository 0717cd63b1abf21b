"""Divides a step's decode rows into pieces of work, on the device, once for all layers.

Owns the record of a piece and the rule of the division. Never reads keys or values. Grids do not
depend on lengths, which stay on the device. With a window, a row's tiles are those from the
window's first key on.

A record is eight int32: item (row * Hkv + head; -1: no work), first tile, tiles, context
length, block of the first tile, block of the second, first of the item's partials, and
pieces of the item * 65536 + this one's index.

The rule (measured on an H100):

- Take the smallest chunk, in tiles per piece, with which all pieces are resident at once. But
  prefer pieces of up to 8 tiles to a third round of merging.
- If that chunk exceeds MAX_TILES, the card is full anyway: pieces of at most MAX_TILES run longest
  first, so that the hardware balances the end. But if pieces of up to 1.5 times a processor's share
  make all resident, take those: there is then no second round for a few pieces.
- A split costs about half a tile, so there are never more pieces than these rules need.
- If the longest row is a third above the mean, cut the rows that exceed a program's share to that
  share; the extra pieces run where short rows leave room.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nv_kernels.launch.triton_previous import wait_and_hold

RECORD = 8


@triton.jit
def count_pieces(tiles, present, chunk, NUM_KV_HEADS: tl.constexpr):
    """Count the pieces when no piece may exceed `chunk` tiles; an empty row is one piece."""
    return tl.sum(tl.where(present, tl.maximum(tl.cdiv(tiles, chunk), 1), 0), 0) * NUM_KV_HEADS


@triton.jit
def smallest_chunk(tiles, present, low, high, bound, NUM_KV_HEADS: tl.constexpr):
    """Return the smallest chunk in (low, high] with at most `bound` pieces, or `high`."""
    while low + 1 < high:
        middle = (low + high) // 2
        fits = count_pieces(tiles, present, middle, NUM_KV_HEADS) <= bound
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle)
    return high


@triton.jit
def least_chunk(longest, MERGE: tl.constexpr):
    """Return the fewest tiles that a piece should have, at most 8: a merging round costs as much.

    One round for a row of up to 4 * MERGE tiles, two for longer ones.
    """
    one_round = tl.minimum(tl.cdiv(longest, MERGE), 4)
    two_rounds = tl.minimum(tl.cdiv(longest, 2 * MERGE), 8)
    return tl.maximum(tl.maximum(one_round, two_rounds), 1)


@triton.jit
def choose_chunk(
    tiles,
    present,
    num_pieces,
    num_resident,
    NUM_KV_HEADS: tl.constexpr,
    MERGE: tl.constexpr,
    MAX_TILES: tl.constexpr,
    CUT_UNEVEN: tl.constexpr,
):
    """Return the most tiles of a piece: few enough to fill the card, and at most MAX_TILES.

    Two exceptions: up to 1.5 times a processor's share if all pieces then run at once, and at most
    a program's share where longer pieces would leave other programs idle.
    """
    low = least_chunk(tl.max(tiles, 0), MERGE) - 1
    high = tl.full((), MAX_TILES, tl.int32)  # a loop carries tensors, not constants
    chunk = smallest_chunk(tiles, present, low, high, num_resident, NUM_KV_HEADS)
    if count_pieces(tiles, present, chunk, NUM_KV_HEADS) > num_resident:
        share = tl.sum(tiles, 0) * NUM_KV_HEADS // num_resident
        most = tl.maximum(chunk, share * 3 // 2)
        larger = smallest_chunk(tiles, present, chunk, most, num_resident, NUM_KV_HEADS)
        at_once = count_pieces(tiles, present, larger, NUM_KV_HEADS) <= num_resident
        chunk = tl.where(at_once, larger, chunk)
    if CUT_UNEVEN:
        all_tiles = tl.sum(tiles, 0) * NUM_KV_HEADS
        longest = tl.minimum(chunk, tl.max(tiles, 0))
        pieces = count_pieces(tiles, present, chunk, NUM_KV_HEADS)
        is_uneven = longest * pieces * 3 > all_tiles * 4
        share = tl.maximum(tl.cdiv(all_tiles, num_resident), 1)
        chunk = tl.where(is_uneven, tl.minimum(longest, share), chunk)
    if count_pieces(tiles, present, chunk, NUM_KV_HEADS) > num_pieces:
        most = tl.max(tiles, 0)
        chunk = smallest_chunk(tiles, present, chunk, most, num_pieces, NUM_KV_HEADS)
    return chunk


@triton.jit(do_not_specialize=["table_stride", "num_rows", "num_pieces", "num_resident"])
def decode_plan_kernel(
    context_lens_ptr,
    block_tables_ptr,
    records_ptr,
    counters_ptr,
    table_stride,
    num_rows,
    num_pieces,
    num_resident,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    MERGE: tl.constexpr,
    MAX_TILES: tl.constexpr,
    CUT_UNEVEN: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program i writes the records of row i; every program repeats the small sums over all rows.

    ROWS is a power of two, at least num_rows. num_pieces is the number of records, which bounds
    the pieces. CHUNK records are written at a time. WINDOW: keys of a row; 0: all.
    """
    wait_and_hold(PDL)  # attention reads the records before its own wait
    row = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    present = rows < num_rows
    lengths = tl.load(context_lens_ptr + rows, mask=present, other=0)
    tiles = tl.cdiv(lengths, TILE)
    if WINDOW > 0:
        tiles -= tl.maximum(lengths - WINDOW, 0) // TILE
    chunk = choose_chunk(
        tiles,
        present,
        num_pieces,
        num_resident,
        NUM_KV_HEADS,
        MERGE,
        MAX_TILES,
        CUT_UNEVEN,
    )
    pieces = tl.where(present, tl.maximum(tl.cdiv(tiles, chunk), 1), 0)  # pieces per head
    longest = tl.cdiv(tiles, tl.maximum(pieces, 1))

    length = tl.load(context_lens_ptr + row)
    own_tiles = tl.cdiv(length, TILE)
    if WINDOW > 0:
        before_window = tl.maximum(length - WINDOW, 0) // TILE
        own_tiles -= before_window
    own_pieces = tl.maximum(tl.cdiv(own_tiles, chunk), 1)
    own_longest = tl.cdiv(own_tiles, own_pieces)
    before = (longest > own_longest) | ((longest == own_longest) & (rows < row))
    first = tl.sum(tl.where(before, pieces, 0), 0) * NUM_KV_HEADS
    total = tl.sum(pieces, 0) * NUM_KV_HEADS
    table = block_tables_ptr + row.to(tl.int64) * table_stride
    small = own_tiles // own_pieces
    uneven = own_tiles % own_pieces  # number of pieces with one more tile
    for start in tl.range(0, own_pieces * NUM_KV_HEADS, CHUNK, num_stages=1):
        piece = start + tl.arange(0, CHUNK)
        mine = piece < own_pieces * NUM_KV_HEADS
        index = piece // NUM_KV_HEADS
        head = piece % NUM_KV_HEADS
        tile = index * small + tl.minimum(index, uneven)
        if WINDOW > 0:
            tile += before_window
        count = small + (index < uneven).to(tl.int32)
        second = tl.maximum(tl.minimum(tile + 1, tile + count - 1), 0)
        some = mine & (count > 0)
        block = tl.load(table + (tile * TILE) // BLOCK_SIZE, mask=some, other=0)
        next_block = tl.load(table + (second * TILE) // BLOCK_SIZE, mask=some, other=0)
        record = records_ptr + (first + piece) * 8
        tl.store(record, row * NUM_KV_HEADS + head, mask=mine)
        tl.store(record + 1, tile, mask=mine)
        tl.store(record + 2, count, mask=mine)
        tl.store(record + 3, length + tl.zeros_like(piece), mask=mine)
        tl.store(record + 4, block, mask=mine)
        tl.store(record + 5, next_block, mask=mine)
        tl.store(record + 6, first + head * own_pieces, mask=mine)
        tl.store(record + 7, own_pieces * 65536 + index, mask=mine)
        tl.store(counters_ptr + first + piece, tl.zeros_like(piece), mask=mine)
    for start in tl.range(total + row * CHUNK, num_pieces, num_rows * CHUNK, num_stages=1):
        spare = start + tl.arange(0, CHUNK)
        tl.store(records_ptr + spare * 8, tl.full([CHUNK], -1, tl.int32), mask=spare < num_pieces)
        tl.store(records_ptr + spare * 8 + 2, tl.zeros_like(spare), mask=spare < num_pieces)
