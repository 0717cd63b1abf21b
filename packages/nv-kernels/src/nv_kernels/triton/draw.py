"""The pieces of a draw: uniform number, tile statistics, inversion.

The definition is docs/architecture.md, "The draw". A row's vocabulary is cut into tiles of TILE
tokens, always the same size, so that a row's draw does not depend on how many rows there are. Of
each tile the maximum and the mass relative to it are enough to find the drawn tile; only that
tile is read again.

Owns device functions and the two kernels of a draw without filters. Never launches them.
"""

# A kernel is written in Triton's own dialect, which neither tool reads.
# ruff: noqa: ANN001, ANN201, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

gdc_launch = tl.extra.cuda.gdc_launch_dependents
gdc_wait = tl.extra.cuda.gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(-float("inf"))
UNITS = tl.constexpr(1099511627776.0)  # 2^40 to the row's largest weight


@triton.jit
def inverse_temperature(temperature):
    """log2(e) / T, finite; greedy rows count as T = 1."""
    return tl.minimum(LOG2E / tl.where(temperature > 0, temperature, 1.0), 1e30)


@triton.jit
def uniform(seed, position, turn):
    """Philox4x32-10: key = seed, counter = (turn, position, 0, 0); 24 bits, as an exact fp64."""
    zero = tl.zeros((1,), tl.int32)
    word, _, _, _ = tl.philox(seed, zero + turn, zero + position.to(tl.int32), zero, zero)
    return tl.sum((word >> 8).to(tl.float64) * 5.9604644775390625e-08, 0)


@triton.jit
def fixed_point(weights):
    """Weights in units of 2^-40: their sums are exact, whatever the order and the warps.

    So the tile of a row without filters is the same beside rows with filters, in another kernel.
    """
    return (tl.where(weights > 0, weights, 0.0) * UNITS).to(tl.int64)


@triton.jit
def _count_and_largest(count, largest, other_count, other_largest):
    return count + other_count, tl.maximum(largest, other_largest)


@triton.jit
def locate(weights, target, SIZE: tl.constexpr):
    """The first index whose cumulative weight exceeds target, and target's distance into it.

    weights [SIZE] int64 >= 0, target below their sum: so the weight at the index is not 0.
    """
    cumulative = tl.cumsum(weights, 0)
    passed = cumulative <= target
    index, before = tl.reduce(
        (passed.to(tl.int32), tl.where(passed, cumulative, 0)), 0, _count_and_largest
    )
    return tl.minimum(index, SIZE - 1), target - before


@triton.jit
def locate_share(weights, u, SIZE: tl.constexpr):
    """Locate u times the sum of fp32 weights [SIZE]."""
    units = fixed_point(weights)
    target = (u * tl.sum(units, 0).to(tl.float64)).to(tl.int64)
    return locate(units, target, SIZE)


@triton.jit
def locate_inside(weights, rest, SIZE: tl.constexpr):
    """Locate a distance inside a tile whose fp32 weights may sum to a little less than it said."""
    units = fixed_point(weights)
    index, _ = locate(units, tl.minimum(rest, tl.sum(units, 0) - 1), SIZE)
    return index


@triton.jit
def load_tile(row, tile, V, TILE: tl.constexpr):
    """One tile's logits [TILE] in their dtype, -inf past the vocabulary."""
    ids = tile * TILE + tl.arange(0, TILE)
    return tl.load(row + ids, mask=ids < V, other=NONE)


@triton.jit
def greedy_token(row, tile_max, highest, V, TILE: tl.constexpr, TILES: tl.constexpr):
    """The lowest id that holds the row's maximum."""
    at = tl.arange(0, TILES)
    tile = tl.min(tl.where(tile_max == highest, at, TILES - 1), 0)
    logits = load_tile(row, tile, V, TILE).to(tl.float32)
    inner = tl.min(tl.where(logits == highest, tl.arange(0, TILE), TILE - 1), 0)
    return tl.minimum(tile * TILE + inner, V - 1)


@triton.jit
def statistics_kernel(
    logits,
    temperature,
    tile_max,
    tile_mass,
    stride,
    V,
    num_tiles,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Maximum logit and sum of exp((x - maximum) / T) of TILES tiles of a row.

    Programs go from the end of the vocabulary: what the LM head wrote last is still in L2.
    """
    row = tl.program_id(0).to(tl.int64)
    tiles = (tl.num_programs(1) - 1 - tl.program_id(1)) * TILES + tl.arange(0, TILES)
    ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    if PDL:
        gdc_launch()
        gdc_wait()
    scale = inverse_temperature(tl.load(temperature + row))
    x = tl.load(logits + row * stride + ids, mask=ids < V, other=NONE).to(tl.float32)
    highest = tl.max(x, 1)
    base = tl.where(highest == NONE, 0.0, highest)
    mass = tl.sum(tl.exp2((x - base[:, None]) * scale), 1)
    tl.store(tile_max + row * num_tiles + tiles, highest, mask=tiles < num_tiles)
    tl.store(tile_mass + row * num_tiles + tiles, mass, mask=tiles < num_tiles)


@triton.jit
def pick_kernel(
    logits,
    temperature,
    seeds,
    positions,
    tile_max,
    tile_mass,
    out,
    stride,
    V,
    num_tiles,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row: the tile by its mass, then the token in it; greedy where T is 0."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch()
        gdc_wait()
    heat = tl.load(temperature + row)
    scale = inverse_temperature(heat)
    u = uniform(tl.load(seeds + row), tl.load(positions + row), 0)
    tiles = tl.arange(0, TILES)
    inside = tiles < num_tiles
    maxima = tl.load(tile_max + row * num_tiles + tiles, mask=inside, other=NONE)
    masses = tl.load(tile_mass + row * num_tiles + tiles, mask=inside, other=0.0)
    highest = tl.max(maxima, 0)
    line = logits + row * stride
    if heat > 0:
        weights = masses * tl.exp2((maxima - highest) * scale)
        tile, rest = locate_share(weights, u, TILES)
        x = load_tile(line, tile, V, TILE).to(tl.float32)
        inner = locate_inside(tl.exp2((x - highest) * scale), rest, TILE)
        token = tl.where(tl.sum(weights, 0) > 0, tile * TILE + inner, 0)  # not so of a NaN
    else:
        token = greedy_token(line, maxima, highest, V, TILE, TILES)
    tl.store(out + row, token.to(tl.int64))
