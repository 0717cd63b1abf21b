"""Top-k, top-p and min-p without a sort, one program a row. docs/architecture.md, "The draw".

min-p is a line under the row's maximum. top-k: the k-th largest tile maximum bounds the k-th
largest logit from below, so only the tiles that reach it (about k) are read; a histogram of their
order keys, refined level by level, gives the exact threshold, ties kept. top-p: draw, accept if
the mass above the drawn logit is less than p of the total, else the set shrinks to what is above
it: exact, and the number of passes does not grow with the vocabulary.

Owns the kernel. Never launches it.
"""

# A kernel is written in Triton's own dialect, which neither tool reads.
# ruff: noqa: ANN001, ANN201, ANN202, PLR0915, PLR0917, RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, unreachable"
# mypy: disable-error-code="var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from nv_kernels.triton.draw import (
    GROUP,
    NONE,
    draw_tile,
    greedy_token,
    inverse_temperature,
    invert,
    load_tile,
    uniform,
)

gdc_launch = tl.extra.cuda.gdc_launch_dependents
gdc_wait = tl.extra.cuda.gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
BELOW_16 = tl.constexpr(-40000)  # below the key of every 16-bit logit
BELOW_32 = tl.constexpr(-(1 << 32))


@triton.jit
def order_key(x):
    """An integer that orders as the logit does (-0 as 0): int32 of 16-bit logits, else int64."""
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    else:
        bits = x.to(tl.int16, bitcast=True)
        key = (bits ^ ((bits >> 15) & 0x7FFF)).to(tl.int32)
    return tl.where(x == 0, 0, key)


@triton.jit
def _count(pointers, mask):
    """Add one at each pointer, in the layout the logits came in: tl.atomic_add would move them."""
    if INTERPRETED:
        tl.atomic_add(pointers, 1, mask=mask, sem="relaxed", scope="cta")
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p red.relaxed.cta.global.add.s32 [$1], 1;"
            " mov.u32 $0, 0; }",
            "=r,l,r",
            [pointers.to(tl.int64), mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _list_tiles(list_ptr, keep, TILES: tl.constexpr):
    """Write the numbers of the kept tiles in order; how many."""
    kept = keep.to(tl.int32)
    tl.store(list_ptr + tl.cumsum(kept, 0) - 1, tl.arange(0, TILES), mask=keep)
    tl.debug_barrier()
    return tl.sum(kept, 0)


@triton.jit
def _load_listed(line, list_ptr, start, count, V, STEP: tl.constexpr, TILE: tl.constexpr):
    """Logits [STEP, TILE] of the listed tiles from start on, -inf past the list's end."""
    at = start + tl.arange(0, STEP)
    tiles = tl.load(list_ptr + at, mask=at < count, other=0)
    ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    return tl.load(line + ids, mask=(at < count)[:, None] & (ids < V), other=NONE)


@triton.jit
def _masses(
    line, list_ptr, mass_ptr, count, V, highest, scale, threshold, min_p,
    STEP: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Write the kept mass of each listed tile; their sum. Kept: key >= threshold, above min-p."""
    total = tl.zeros((STEP,), tl.float32)
    for start in range(0, count, STEP * AHEAD):
        loaded = ()
        for part in tl.static_range(AHEAD):
            loaded = loaded + (
                _load_listed(line, list_ptr, start + part * STEP, count, V, STEP, TILE),
            )
        for part in tl.static_range(AHEAD):
            x = loaded[part]
            mass = tl.exp2((x.to(tl.float32) - highest) * scale)
            mass = tl.sum(tl.where((order_key(x) >= threshold) & (mass >= min_p), mass, 0.0), 1)
            at = start + part * STEP + tl.arange(0, STEP)
            tl.store(mass_ptr + at, mass, mask=at < count)
            total += mass
    tl.debug_barrier()
    return tl.sum(total, 0)


@triton.jit
def _kth_tile(keys, k, lowest, highest):
    """The k-th largest of the tiles' keys: the largest key that k of them reach."""
    low = lowest
    high = highest + 1
    while high - low > 1:
        middle = (low + high) >> 1
        enough = tl.sum((keys >= middle).to(tl.int32), 0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _kth_key(
    line, list_ptr, bins_ptr, count, V, k, low, high,
    BINS: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The k-th largest key of the listed tiles, known to lie in [low, high)."""
    bins = tl.arange(0, BINS)
    above = 0  # keys at or past high
    while high - low > 1:
        shift = 0
        while ((high - low - 1) >> shift) >= BINS:
            shift += 1
        tl.store(bins_ptr + bins, tl.zeros((BINS,), tl.int32))
        tl.debug_barrier()
        for start in range(0, count, STEP * AHEAD):
            loaded = ()
            for part in tl.static_range(AHEAD):
                loaded = loaded + (
                    _load_listed(line, list_ptr, start + part * STEP, count, V, STEP, TILE),
                )
            for part in tl.static_range(AHEAD):
                key = order_key(loaded[part])
                at = start + part * STEP + tl.arange(0, STEP)
                counted = (key >= low) & (key < high) & (at < count)[:, None]
                place = ((key - low) >> shift).to(tl.int32)
                _count(bins_ptr + place, counted)
        tl.debug_barrier()
        found = tl.load(bins_ptr + bins, volatile=True)
        reached = above + tl.sum(found, 0) - tl.cumsum(found, 0) + found
        chosen = tl.max(tl.where(reached >= k, bins, 0), 0)
        above += tl.sum(tl.where(bins > chosen, found, 0), 0)
        top = low + ((chosen + 1).to(low.dtype) << shift)
        high = tl.minimum(high, top)
        low += chosen.to(low.dtype) << shift
    return low


@triton.jit
def _draw_listed(list_ptr, mass_ptr, count, u, TILES: tl.constexpr):
    """Draw one of the listed tiles by mass: (tile, where u falls inside it)."""
    at = tl.arange(0, TILES)
    weights = tl.load(mass_ptr + at, mask=at < count, other=0.0)
    place, rest, _ = invert(weights, u, TILES)
    return tl.load(list_ptr + place), rest


@triton.jit
def _draw_token(line, tile, rest, V, scale, highest, threshold, min_p, TILE: tl.constexpr):
    """Draw one of a tile's kept tokens: (id, key)."""
    x = load_tile(line, tile, V, TILE)
    key = order_key(x)
    values = x.to(tl.float32)
    kept = (key >= threshold) & (tl.exp2((values - highest) * scale) >= min_p)
    # As a row without filters: relative to the tile's own maximum.
    mass = tl.where(kept, tl.exp2((values - tl.max(values, 0)) * scale), 0.0)
    inner, _, _ = invert(mass, rest, TILE)
    drawn = tl.max(tl.where(tl.arange(0, TILE) == inner, key, tl.min(key, 0)), 0)
    return tile * TILE + inner, drawn


@triton.jit
def filter_kernel(
    logits, temperature, top_k, top_p, min_p, seeds, positions,
    tile_max, tile_mass, tile_list, list_mass, bins, out,
    stride, V, num_groups,
    GROUPS: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr,
    STEP: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draw a row's token under its filters; greedy where T is 0."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch()
        gdc_wait()
    line = logits + row * stride
    list_ptr = tile_list + row * TILES
    mass_ptr = list_mass + row * TILES
    num_tiles = num_groups * GROUP
    tile_max += row * num_tiles
    tile_mass += row * num_tiles
    heat = tl.load(temperature + row)
    if heat == 0:
        token = greedy_token(line, tile_max, num_groups, V, GROUPS, TILE)
        tl.store(out + row, token.to(tl.int64))
        return
    scale = inverse_temperature(heat)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    floor = tl.load(min_p + row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    tiles = tl.arange(0, TILES)
    inside = tiles < num_tiles
    maxima = tl.load(tile_max + tiles, mask=inside, other=NONE)
    highest = tl.max(maxima, 0)
    keys = order_key(maxima.to(logits.dtype.element_ty))
    largest = tl.max(keys, 0)
    if logits.dtype.element_ty == tl.float32:
        smallest = tl.full((), BELOW_32, tl.int64)
    else:
        smallest = tl.full((), BELOW_16, tl.int32)
    threshold = smallest
    reached = inside & (tl.exp2((maxima - highest) * scale) >= floor)
    limited = (k > 0) & (k < V)
    if limited:
        if k <= num_tiles:
            threshold = _kth_tile(tl.where(inside, keys, smallest), k, smallest, largest)
        count = _list_tiles(list_ptr, reached & (keys >= threshold), TILES)
        threshold = _kth_key(
            line, list_ptr, bins + row * BINS, count, V, k, threshold, largest + 1,
            BINS, STEP, TILE, AHEAD,
        )  # fmt: skip
    u = uniform(seed, position, 0)
    if limited | (floor > 0):
        count = _list_tiles(list_ptr, reached & (keys >= threshold), TILES)
        total = _masses(
            line, list_ptr, mass_ptr, count, V, highest, scale, threshold, floor,
            STEP, TILE, AHEAD,
        )  # fmt: skip
        tile, rest = _draw_listed(list_ptr, mass_ptr, count, u, TILES)
    else:
        tile, rest, total = draw_tile(tile_max, tile_mass, scale, u, num_groups, GROUPS)
    token, drawn = _draw_token(line, tile, rest, V, scale, highest, threshold, floor, TILE)
    turn = 0
    searching = (p < 1) & (drawn < largest)
    while searching:
        tl.debug_barrier()  # the list is read no more
        count = _list_tiles(list_ptr, reached & (keys > drawn), TILES)
        above = _masses(
            line, list_ptr, mass_ptr, count, V, highest, scale, drawn + 1, floor,
            STEP, TILE, AHEAD,
        )  # fmt: skip
        searching = above >= p * total
        if searching:
            threshold = drawn + 1
            turn += 1
            u = uniform(seed, position, turn)
            tile, rest = _draw_listed(list_ptr, mass_ptr, count, u, TILES)
            token, drawn = _draw_token(line, tile, rest, V, scale, highest, threshold, floor, TILE)
            searching = drawn < largest
    tl.store(out + row, tl.where(total > 0, token, 0).to(tl.int64))
