"""The choice of experts on a card, and the sort of its entries: one launch each.

A program handles a block of tokens. With few tokens it is one warp with one token, whose maxima
need no barrier. For the sort, the first kernel counts the entries of each expert in its block; a
program of the second sums the counts of all blocks, so it knows where its own entries start. The
kernels use no atomics, so the order is the same every time.
"""

# mypy: disable-error-code="assignment, unreachable, var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.launch.triton_previous import wait_for_previous
from nv_kernels.linear.experts.routing import Routing, num_tiles

ELEMENTS = 2048  # of a program's [tokens, experts] at once, where entries are sorted
COUNTED = 8192  # of the [blocks, experts] whose counts are read at once
MOST_TOKENS = 64
MOST_BLOCKS = 256  # every program of the sort reads the counts of all blocks


@triton.jit
def _keys(x, columns, dtype: tl.constexpr):
    """Return integers in the order of logits x, which are of this dtype, and distinct in a row.

    Of equal logits the lower column has the higher key. 16 bits of a key are the column's; the
    bits above are the logit's.
    """
    x = tl.where(x == 0.0, 0.0, x)  # -0.0 equals 0.0
    low = (0xFFFF - columns)[None, :]
    if dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        return (bits.to(tl.int64) << 16) | low.to(tl.int64)
    else:
        bits = x.to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
        bits = tl.where(bits < 0, bits ^ 0x7FFF, bits)
        return (bits << 16) | low


@triton.jit
def _logits(keys, dtype: tl.constexpr):
    """Return the logits in fp32 that keys were made of."""
    bits = (keys >> 16).to(tl.int32)
    if dtype == tl.float32:
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        return bits.to(tl.float32, bitcast=True)
    else:
        bits = tl.where(bits < 0, bits ^ 0x7FFF, bits)
        return bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens", "steps"])
def route_kernel(
    logits, experts, weights, counts, slots, num_tokens, steps,
    E: tl.constexpr, TOP_K: tl.constexpr, NORMALISED: tl.constexpr, PARTIALS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose for steps * TOKENS tokens; store the entries of each expert, or each expert's slot.

    Either is None if it is not wanted.
    """
    wait_for_previous(PDL)
    dtype: tl.constexpr = weights.dtype.element_ty
    LOWEST: tl.constexpr = -(2**63) if dtype == tl.float32 else -(2**31)
    columns = tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], tl.int32)
    for step in range(steps):
        rows = (tl.program_id(0) * steps + step) * TOKENS + tl.arange(0, TOKENS)
        is_real = rows < num_tokens
        inside = is_real[:, None] & (columns < E)[None, :]
        at = rows[:, None].to(tl.int64) * E + columns[None, :]
        x = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTIALS):
            start = tl.cast(num_tokens, tl.int64) * (part * E)
            x += tl.load(logits + start + at, mask=inside, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
        keys = _keys(x, columns, dtype)
        keys = tl.where((columns < E)[None, :], keys, LOWEST)
        x = tl.where((columns < E)[None, :], x, float("-inf"))
        top = tl.max(x, 1)
        whole = tl.sum(tl.exp(x - top[:, None]), 1)
        values = ()
        chosen = tl.zeros([TOKENS], tl.float32)
        slot_of = tl.full([TOKENS, BLOCK_E], -1, tl.int32)
        for slot in tl.static_range(TOP_K):
            best = tl.max(keys, 1)
            ids = 0xFFFF - (best & 0xFFFF).to(tl.int32)
            value = tl.exp(_logits(best, dtype) - top) / whole
            values = values + (value,)
            chosen += value
            tl.store(experts + rows * TOP_K + slot, ids, mask=is_real)
            hit = keys == best[:, None]
            keys = tl.where(hit, LOWEST, keys)
            slot_of = tl.where(hit, slot, slot_of)
        for slot in tl.static_range(TOP_K):
            weight = values[slot] / chosen if NORMALISED else values[slot]
            tl.store(weights + rows * TOP_K + slot, weight.to(dtype), mask=is_real)
        if slots is not None:
            tl.store(slots + columns[None, :] * num_tokens + rows[:, None], slot_of, mask=inside)
        if counts is not None:
            total += tl.sum(((slot_of >= 0) & is_real[:, None]).to(tl.int32), 0)
    if counts is not None:
        tl.store(counts + tl.program_id(0) * E + columns, total, mask=columns < E)


@triton.jit(do_not_specialize=["num_tokens", "steps", "tiles"])
def places_kernel(
    experts, counts, places, tile_experts, num_tokens, steps, tiles,
    E: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the places of steps * TOKENS tokens' entries, and describe a share of the tiles.

    The counts of BLOCKS blocks are read at once.
    """
    wait_for_previous(PDL)
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK_E)
    totals = tl.zeros([BLOCK_E], tl.int32)
    before = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_blocks, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        inside = (blocks < num_blocks)[:, None] & (columns < E)[None, :]
        some = tl.load(counts + blocks[:, None] * E + columns[None, :], mask=inside, other=0)
        totals += tl.sum(some, 0)
        before += tl.sum(tl.where((blocks < block)[:, None], some, 0), 0)
    padded = (totals + TILE - 1) // TILE * TILE
    ends = tl.cumsum(padded, 0)
    next_place = ends - padded + before  # of each expert
    for step in range(steps):
        rows = (block * steps + step) * TOKENS + tl.arange(0, TOKENS)
        picked = tl.zeros([TOKENS, BLOCK_E], tl.int32)
        slots = tl.zeros([TOKENS, BLOCK_E], tl.int32)
        for slot in tl.static_range(TOP_K):
            ids = tl.load(experts + rows * TOP_K + slot, mask=rows < num_tokens, other=-1)
            hit = columns[None, :] == ids[:, None]
            picked = tl.where(hit, 1, picked)
            slots = tl.where(hit, slot, slots)
        place = next_place[None, :] + tl.cumsum(picked, 0) - picked
        tl.store(places + place, rows[:, None] * TOP_K + slots, mask=picked == 1)
        next_place += tl.sum(picked, 0)
    real_ends = ends - padded + totals
    for first in range(block * TOKENS, tiles, num_blocks * TOKENS):
        tile = first + tl.arange(0, TOKENS)
        passed = (ends[None, :] <= tile[:, None] * TILE) & (columns < E)[None, :]
        owner = tl.sum(passed.to(tl.int32), 1)
        tl.store(tile_experts + tile, tl.where(owner < E, owner, -1), mask=tile < tiles)
        owned = columns[None, :] == tl.where(owner < E, owner, BLOCK_E)[:, None]
        end = tl.sum(tl.where(owned, real_ends[None, :], 0), 1)
        place = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        is_empty = (place >= end[:, None]) & (tile < tiles)[:, None]
        tl.store(places + place, tl.full([TOKENS, TILE], -1, tl.int32), mask=is_empty)


def route(
    logits: torch.Tensor,
    top_k: int,
    normalised: bool,
    tile: int = 0,
    *,
    is_sorted: bool = True,
    dtype: torch.dtype | None = None,
) -> Routing:
    """Choose experts; see `nv_kernels.reference.route`. A logit that is NaN counts as the highest.

    Args:
        logits: [T, E] or [P, T, E], E at most 65,535.
        top_k: k, from 1 to E.
        normalised: divide the chosen probabilities by their sum.
        tile: a power of two, or 0.
        is_sorted: with tiles, whether entries are sorted into them, or slots are given.
        dtype: the model's, where logits are partials.
    """
    logits = logits.contiguous()
    num_tokens, num_experts = logits.shape[-2:]
    block_e = next_power_of_2(num_experts)
    tokens, steps, warps = 1, 1, 1
    if tile and is_sorted:
        tokens, warps = max(1, min(MOST_TOKENS, ELEMENTS // block_e)), 4
        steps = max(1, cdiv(num_tokens, tokens * MOST_BLOCKS))
    blocks = cdiv(num_tokens, tokens * steps)

    def integers(*shape: int, of: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device=logits.device)

    experts, counts, slots = integers(num_tokens, top_k), None, None
    if tile and is_sorted:
        counts = integers(blocks, num_experts)
    elif tile:
        slots = integers(num_experts, num_tokens, of=torch.int16)
    weights = torch.empty_like(experts, dtype=dtype or logits.dtype)
    options = dependent_launch(logits)
    if blocks:
        route_kernel[(blocks,)](
            logits, experts, weights, counts, slots, num_tokens, steps, num_experts, top_k,
            normalised, logits.shape[0] if logits.dim() == 3 else 1, tokens, block_e,
            num_warps=warps, **options,
        )  # fmt: skip
    if counts is None:
        return Routing(experts, weights, tile, slots=slots)
    tiles = num_tiles(num_tokens * top_k, num_experts, tile)
    places, tile_experts = integers(tiles * tile), integers(tiles)
    if blocks:
        places_kernel[(blocks,)](
            experts, counts, places, tile_experts, num_tokens, steps, tiles, num_experts, top_k,
            tile, tokens, max(1, COUNTED // block_e), block_e, num_warps=4, **options,
        )  # fmt: skip
    return Routing(experts, weights, tile, places, tile_experts)
