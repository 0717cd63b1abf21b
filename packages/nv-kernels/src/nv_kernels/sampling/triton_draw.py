"""The parts of a draw: uniform number, tile statistics, inversion.

The definition is `sampling.draw`. A row's vocabulary is split into tiles of TILE tokens and groups
of GROUP tiles. Their sizes are fixed, so that a row's draw does not depend on the number of rows.
With s = log2(e) / T, h the row's maximum and W the sum of all w_i:

    w_i = 2^((x_i - h) s)                      mass of id i
    m_t = max of x_i in tile t                 n_t = sum of 2^((x_i - m_t) s) in tile t
    W_t = n_t 2^((m_t - h) s)                  mass of tile t, from its two statistics

The token is the first id at which w_0 + ... + w_i exceeds u W. That is an inversion in three
levels: the first group at which the summed W_t exceed u W, with u' = (u W - mass before it) / (its
mass); the first tile in it for u', which gives u''; the first id in the tile for u''. The masses of
the last level are relative to m_t, a factor that cancels. Only the drawn tile is read again.

Owns device functions and the two kernels of a draw without filters.
"""

from __future__ import annotations

import triton
import triton.language as tl

gdc_launch = tl.extra.cuda.gdc_launch_dependents
gdc_wait = tl.extra.cuda.gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(-float("inf"))
INFINITE = tl.constexpr(float("inf"))
GROUP = tl.constexpr(32)  # tiles per group, which one program of the statistics computes


@triton.jit
def inverse_temperature(temperature):
    """Return log2(e) / T, finite; T = 1 for greedy rows."""
    return tl.minimum(LOG2E / tl.where(temperature > 0, temperature, 1.0), 1e30)


@triton.jit
def uniform(seed, position, turn):
    """Philox4x32-10: key = seed, counter = (turn, position, 0, 0); 24 bits."""
    zero = tl.zeros((1,), tl.int32)
    word, _, _, _ = tl.philox(seed, zero + turn, zero + position.to(tl.int32), zero, zero)
    return tl.sum((word >> 8).to(tl.float32) * 5.9604644775390625e-08, 0)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def invert(weights, u, SIZE: tl.constexpr):
    """Find the first index whose cumulative weight exceeds u * total.

    weights [SIZE] >= 0; an index of weight 0 is never returned. Returns (index, remainder, total);
    remainder is the position of u inside the index's weight.
    """
    at = tl.arange(0, SIZE)
    cumulative = tl.cumsum(weights, 0)
    total = tl.sum(weights, 0)  # NaN if a weight is NaN
    target = u * total
    # If, by rounding, no index exceeds the target: the last one with a weight.
    rank = tl.where(weights > 0, 2 * SIZE - at, 3 * SIZE)
    index = tl.min(tl.where((weights > 0) & (cumulative > target), at, rank), 0)
    index = tl.where(index < SIZE, index, tl.maximum(2 * SIZE - index, 0))
    chosen = at == index
    end, own = tl.reduce(
        (tl.where(chosen, cumulative, 0.0), tl.where(chosen, weights, 0.0)), 0, _add_pairs
    )
    remainder = tl.minimum(tl.maximum((target - (end - own)) / own, 0.0), 0.99999994)
    return index, remainder, total


@triton.jit
def load_tile(row, tile, V, TILE: tl.constexpr):
    """Load one tile's logits [TILE] in their dtype, -inf past the vocabulary."""
    ids = tile * TILE + tl.arange(0, TILE)
    return tl.load(row + ids, mask=ids < V, other=NONE)


@triton.jit
def load_groups(statistics, num_groups, other, GROUPS: tl.constexpr):
    """Load a row's tile statistics [GROUPS, GROUP], `other` past its groups."""
    groups = tl.arange(0, GROUPS)
    at = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.load(statistics + at, mask=(groups < num_groups)[:, None], other=other)


@triton.jit
def draw_tile(tile_max, tile_mass, scale, u, num_groups, GROUPS: tl.constexpr):
    """Draw a tile of a row without filters: (tile, position of u inside it, the row's total)."""
    maxima = load_groups(tile_max, num_groups, NONE, GROUPS)
    masses = load_groups(tile_mass, num_groups, 0.0, GROUPS)
    highest = tl.max(tl.max(maxima, 1), 0)
    weights = tl.sum(masses * tl.exp2((maxima - highest) * scale), 1)
    group, rest, total = invert(weights, u, GROUPS)
    tiles = group * GROUP + tl.arange(0, GROUP)
    weights = tl.load(tile_mass + tiles) * tl.exp2((tl.load(tile_max + tiles) - highest) * scale)
    inner, rest, _ = invert(weights, rest, GROUP)
    return group * GROUP + inner, rest, total


@triton.jit
def is_finite(highest):
    """Whether a token can be drawn from a row, by its largest tile maximum."""
    return (highest > NONE) & (highest < INFINITE)


@triton.jit
def greedy_token(row, tile_max, num_groups, V, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """Return the lowest id with the row's maximum; -1 if the maximum is infinite."""
    maxima = load_groups(tile_max, num_groups, NONE, GROUPS)
    highest = tl.max(tl.max(maxima, 1), 0)
    at = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tile = tl.min(tl.min(tl.where(maxima == highest, at, GROUPS * GROUP), 1), 0)
    tile = tl.minimum(tile, num_groups * GROUP - 1)
    logits = load_tile(row, tile, V, TILE).to(tl.float32)
    inner = tl.min(tl.where(logits == highest, tl.arange(0, TILE), TILE - 1), 0)
    return tl.where(is_finite(highest), tile * TILE + inner, -1)


@triton.jit
def statistics_kernel(
    logits, temperature, tile_max, tile_mass,
    stride, V, num_ids, num_groups, TILE: tl.constexpr, ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute maximum logit and sum of exp((x - maximum) / T) of each tile of a group.

    Programs start from the end of the vocabulary: the logits that the LM head wrote last are still
    in L2. A tile past the vocabulary, or past num_ids if given, gets -inf and 0. A tile with a NaN
    or infinity gets an infinite maximum: its mass is NaN, because a maximum ignores a NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    tiles = (num_groups - 1 - tl.program_id(1)) * GROUP + tl.arange(0, GROUP)
    ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    if PDL:
        gdc_launch()
        gdc_wait()
    scale = inverse_temperature(tl.load(temperature + row))
    place = logits + row * stride + ids
    if ONCE:  # filters would read the logits again
        x = tl.load(place, mask=ids < V, other=NONE, eviction_policy="evict_first")
    else:
        x = tl.load(place, mask=ids < V, other=NONE)
    x = x.to(tl.float32)
    if num_ids is not None:
        x = tl.where(ids < num_ids, x, NONE)
    highest = tl.max(x, 1)
    base = tl.where(highest == NONE, 0.0, highest)
    mass = tl.sum(tl.exp2((x - base[:, None]) * scale), 1)
    highest = tl.where(mass >= 0, highest, INFINITE)  # false for NaN too
    tl.store(tile_max + row * (num_groups * GROUP) + tiles, highest)
    tl.store(tile_mass + row * (num_groups * GROUP) + tiles, mass)


@triton.jit
def pick_kernel(
    logits, temperature, seeds, positions, tile_max, tile_mass, out,
    stride, V, num_ids, num_groups, GROUPS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program draws one row: the tile by its mass, then the token in it; greedy if T is 0."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch()
        gdc_wait()
    heat = tl.load(temperature + row)
    scale = inverse_temperature(heat)
    u = uniform(tl.load(seeds + row), tl.load(positions + row), 0)
    line = logits + row * stride
    end = V if num_ids is None else num_ids
    tile_max += row * (num_groups * GROUP)
    tile_mass += row * (num_groups * GROUP)
    if heat > 0:
        tile, rest, total = draw_tile(tile_max, tile_mass, scale, u, num_groups, GROUPS)
        x = load_tile(line, tile, end, TILE).to(tl.float32)
        inner, _, _ = invert(tl.exp2((x - tl.max(x, 0)) * scale), rest, TILE)
        token = tl.where(total > 0, tile * TILE + inner, -1)  # false for NaN
    else:
        token = greedy_token(line, tile_max, num_groups, end, GROUPS, TILE)
    tl.store(out + row, token.to(tl.int64))
