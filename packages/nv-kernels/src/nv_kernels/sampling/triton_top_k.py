"""The k-th largest logit of a row without a sort: bounds from its tiles, then a histogram.

The k-th largest tile maximum bounds the k-th largest logit from below, so only the tiles that
reach it (about k) are read; a histogram of their order keys, refined level by level, gives the
logit itself.
"""

# mypy: disable-error-code="assignment, unreachable, var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from nv_kernels.sampling.triton_draw import NONE
from nv_kernels.sampling.triton_tile_list import count_each, list_tiles, load_listed


@triton.jit
def _order_key(x):
    """Return an integer that orders like the logit, -0 as 0: int32 for 16 bits, else int64."""
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    else:
        bits = x.to(tl.int16, bitcast=True)
        key = (bits ^ ((bits >> 15) & 0x7FFF)).to(tl.int32)
    return tl.where(x == 0, 0, key)


@triton.jit
def _key_value(key, dtype: tl.constexpr):
    """Return the logit of an order key in fp32."""
    if dtype == tl.float32:
        bits = key.to(tl.int32)
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        value = (key ^ ((key >> 15) & 0x7FFF)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _kth_tile(keys, k, lowest, highest):
    """Return the k-th largest of the tiles' keys: the largest key that k of them reach."""
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
    line, list_ptr, bins_ptr, count, V, num_ids, k, low, high,
    BINS: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return the k-th largest key of the listed tiles, which must lie in [low, high)."""
    bins = tl.arange(0, BINS)
    above = 0  # number of keys at or above high
    while high - low > 1:
        shift = 0
        while ((high - low - 1) >> shift) >= BINS:
            shift += 1
        tl.store(bins_ptr + bins, tl.zeros((BINS,), tl.int32))
        tl.debug_barrier()
        for start in range(0, count, STEP * AHEAD):
            loaded = ()
            for part in tl.static_range(AHEAD):
                step = start + part * STEP
                read = load_listed(line, list_ptr, step, count, V, num_ids, STEP, TILE)
                loaded = loaded + (read,)
            for part in tl.static_range(AHEAD):
                logits, _, there = loaded[part]
                key = _order_key(logits)
                counted = (key >= low) & (key < high) & there[:, None]
                place = ((key - low) >> shift).to(tl.int32)
                count_each(bins_ptr + place, counted)
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
def kth_logit(
    line, list_ptr, bins_ptr, maxima, reached, k, V, num_ids, num_tiles,
    TILES: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr, STEP: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Return the k-th largest logit of a row's `reached` tiles in fp32; -inf if there are fewer.

    maxima [TILES] are those of all tiles, -inf past the last. It overwrites list_ptr.
    """
    DTYPE: tl.constexpr = line.dtype.element_ty
    keys = _order_key(maxima.to(DTYPE))
    smallest = _order_key(tl.full((), NONE, tl.float32).to(DTYPE))
    largest = tl.max(keys, 0)
    low = smallest
    if k <= num_tiles:
        low = _kth_tile(keys, k, smallest, largest)
    count = list_tiles(list_ptr, reached & (keys >= low), TILES)
    key = _kth_key(
        line, list_ptr, bins_ptr, count, V, num_ids, k, low, largest + 1, BINS, STEP, TILE, AHEAD
    )
    return _key_value(key, DTYPE)
