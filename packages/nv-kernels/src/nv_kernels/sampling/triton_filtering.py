"""Top-k, top-p and min-p without a sort, one program per row. The definition is `sampling.draw`.

With w_i as in triton_draw.py (1 for the row's maximum) and x_(k) the k-th largest logit
(triton_top_k.py):

    S_0 = {i: w_i >= min_p and x_i >= x_(k)}   ties with x_(k) included
    t_r = the draw from S_r with number u_r    masses of ids outside S_r are 0
    A   = sum of w_i over i in S_0 with x_i > x_(t_r)
    accept t_r if A < p sum(S_0), or if x_(t_r) is the maximum; else S_(r+1) = {i: x_i > x_(t_r)}

Each S_r contains all ids that would be accepted, so the draw from that nucleus is exact. The
number of passes does not grow with the vocabulary.

The mass above is first bounded by the masses of the tiles whose maximum is above the drawn logit. A
pass over these tiles is needed only if the bound does not decide, and it ends as soon as it does.
At p = 0.9 with 151,936 normal logits (deviation 2.5) a row reads 300 tiles again instead of 675. A
pass compares logits without order keys, and the thread that has a tile's mass stores it: on an
H200, 256 such rows take 82 us instead of 111.
"""

# mypy: disable-error-code="assignment, unreachable, var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from nv_kernels.sampling.triton_draw import (
    GROUP,
    NONE,
    draw_tile,
    greedy_token,
    inverse_temperature,
    invert,
    is_finite,
    load_tile,
    uniform,
)
from nv_kernels.sampling.triton_tile_list import list_tiles, load_listed, store_each
from nv_kernels.sampling.triton_top_k import kth_logit

gdc_launch = tl.extra.cuda.gdc_launch_dependents
gdc_wait = tl.extra.cuda.gdc_wait

# The bound is a sum of products that are rounded differently from the mass.
SAFE = tl.constexpr(0.999)


@triton.jit
def _kept(values, mass, limit, min_p, FIRST: tl.constexpr):
    """Return which logits are in the set: those of top-k and min-p, later those above limit.

    limit is then a drawn logit, and min-p has kept all logits above it.
    """
    return (values >= limit) & (mass >= min_p) if FIRST else values > limit


@triton.jit
def _write_masses(
    line, list_ptr, mass_ptr, first, end, V, num_ids, highest, scale, limit, min_p,
    FIRST: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Write the kept mass of the tiles at [first, end) of the list, each at its tile's number."""
    for start in range(first, end, STEP * AHEAD):
        loaded = ()
        for part in tl.static_range(AHEAD):
            step = start + part * STEP
            read = load_listed(line, list_ptr, step, end, V, num_ids, STEP, TILE)
            loaded = loaded + (read,)
        for part in tl.static_range(AHEAD):
            logits, tiles, there = loaded[part]
            values = logits.to(tl.float32)
            mass = tl.exp2((values - highest) * scale)
            mass = tl.where(_kept(values, mass, limit, min_p, FIRST), mass, 0.0)
            store_each(mass_ptr + tiles, tl.sum(mass, 1), there)
    tl.debug_barrier()


@triton.jit
def _load_masses(mass_ptr, keep, TILES: tl.constexpr):
    """Load the masses [TILES] by tile, 0 for tiles that are not kept."""
    return tl.load(mass_ptr + tl.arange(0, TILES), mask=keep, other=0.0)


@triton.jit
def _mass_above(
    line, list_ptr, mass_ptr, keep, V, num_ids, highest, scale, drawn, enough,
    TILES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, AHEAD: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Return the mass of the logits above the drawn one, or a bound on it that is below `enough`.

    keep [TILES]: the tiles whose maximum is above. mass_ptr holds a bound on each tile's mass. If
    the result is not below `enough`, it holds the masses themselves after the call.
    """
    above = tl.sum(_load_masses(mass_ptr, keep, TILES), 0)
    if above >= enough:
        count = list_tiles(list_ptr, keep, TILES)
        first = 0
        while (first < count) & (above >= enough):
            end = tl.minimum(first + SPAN, count)
            _write_masses(
                line, list_ptr, mass_ptr, first, end, V, num_ids, highest, scale, drawn, 0.0,
                False, STEP, TILE, AHEAD,
            )  # fmt: skip
            above = tl.sum(_load_masses(mass_ptr, keep, TILES), 0)
            first = end
    return above


@triton.jit
def _draw_token(
    line, tile, rest, V, scale, highest, limit, min_p, FIRST: tl.constexpr, TILE: tl.constexpr
):
    """Draw one of a tile's kept tokens: (id, its logit)."""
    values = load_tile(line, tile, V, TILE).to(tl.float32)
    kept = _kept(values, tl.exp2((values - highest) * scale), limit, min_p, FIRST)
    # As in a row without filters: relative to the tile's own maximum.
    mass = tl.where(kept, tl.exp2((values - tl.max(values, 0)) * scale), 0.0)
    inner, _, _ = invert(mass, rest, TILE)
    drawn = tl.max(tl.where(tl.arange(0, TILE) == inner, values, NONE), 0)
    return tile * TILE + inner, drawn


@triton.jit
def filter_kernel(
    logits, temperature, top_k, top_p, min_p, seeds, positions,
    tile_max, tile_mass, tile_list, kept_mass, bins, out,
    stride, V, num_ids, num_groups,
    GROUPS: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr,
    STEP: tl.constexpr, AHEAD: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draw a row's token under its filters; greedy if T is 0.

    V bounds the loads of many tiles; num_ids, if given, bounds the ids that may be drawn.
    """
    row = tl.program_id(0).to(tl.int64)
    end = V if num_ids is None else num_ids
    if PDL:
        gdc_launch()
        gdc_wait()
    line = logits + row * stride
    list_ptr = tile_list + row * TILES
    mass_ptr = kept_mass + row * TILES
    num_tiles = num_groups * GROUP
    tile_max += row * num_tiles
    tile_mass += row * num_tiles
    heat = tl.load(temperature + row)
    if heat == 0:
        token = greedy_token(line, tile_max, num_groups, end, GROUPS, TILE)
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
    if not is_finite(highest):
        tl.store(out + row, tl.full((), -1, tl.int64))
        return
    height = tl.exp2((maxima - highest) * scale)
    reached = inside & (height >= floor)
    lowest = tl.full((), NONE, tl.float32)
    limited = (k > 0) & (k < end)
    if limited:
        lowest = kth_logit(
            line, list_ptr, bins + row * BINS, maxima, reached, k, V, num_ids, num_tiles,
            TILES, TILE, BINS, STEP, AHEAD,
        )  # fmt: skip
    u = uniform(seed, position, 0)
    if limited | (floor > 0):
        reached = reached & (maxima >= lowest)
        count = list_tiles(list_ptr, reached, TILES)
        _write_masses(
            line, list_ptr, mass_ptr, 0, count, V, num_ids, highest, scale, lowest, floor,
            True, STEP, TILE, AHEAD,
        )  # fmt: skip
        tile, rest, total = invert(_load_masses(mass_ptr, reached, TILES), u, TILES)
    else:
        tile, rest, total = draw_tile(tile_max, tile_mass, scale, u, num_groups, GROUPS)
        mass = tl.load(tile_mass + tiles, mask=inside, other=0.0) * height
        tl.store(mass_ptr + tiles, mass, mask=inside)
    token, drawn = _draw_token(line, tile, rest, end, scale, highest, lowest, floor, True, TILE)
    turn = 0
    # Then the largest logit is above the drawn one and has a mass: the set shrinks each time.
    searching = (p < 1) & (drawn < highest)
    while searching:
        keep = reached & (maxima > drawn)
        above = _mass_above(
            line, list_ptr, mass_ptr, keep, V, num_ids, highest, scale, drawn, SAFE * (p * total),
            TILES, TILE, STEP, AHEAD, SPAN,
        )  # fmt: skip
        searching = above >= p * total
        if searching:
            turn += 1
            u = uniform(seed, position, turn)
            tile, rest, _ = invert(_load_masses(mass_ptr, keep, TILES), u, TILES)
            token, drawn = _draw_token(
                line, tile, rest, end, scale, highest, drawn, 0.0, False, TILE
            )
            searching = drawn < highest
    tl.store(out + row, token.to(tl.int64))
