"""The choice of experts on a card, and the sort of its entries: one launch each.

A program handles a block of tokens. The first kernel counts the entries of each expert in its
block; a program of the second sums the counts of all blocks, so it knows where its own entries
start. There are no atomics: the order is the same every time.
"""

# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.launch.triton_previous import wait_for_previous
from nv_kernels.linear.experts.routing import Routing, num_tiles

ELEMENTS = 1024  # of a program's [tokens, experts] at once
MOST_TOKENS = 64
MOST_BLOCKS = 256  # every program of the sort reads the counts of all blocks
LOWEST = tl.constexpr(-(2**63))


@triton.jit(do_not_specialize=["num_tokens", "steps"])
def route_kernel(
    logits, experts, weights, counts, num_tokens, steps,
    E: tl.constexpr, TOP_K: tl.constexpr, NORMALISED: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_E: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose for steps * TOKENS tokens; COUNT: store the entries of each expert."""
    wait_for_previous(PDL)
    columns = tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], tl.int32)
    for step in range(steps):
        rows = (tl.program_id(0) * steps + step) * TOKENS + tl.arange(0, TOKENS)
        inside = (rows < num_tokens)[:, None] & (columns < E)[None, :]
        at = rows[:, None].to(tl.int64) * E + columns[None, :]
        x = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.where((columns < E)[None, :], x, float("-inf"))
        exps = tl.exp(x - tl.max(x, 1)[:, None])
        probabilities = exps / tl.sum(exps, 1)[:, None]
        # Integers in the order of the logits; of equal logits the lower column has the higher key.
        bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        keys = (bits.to(tl.int64) << 16) | (0xFFFF - columns)[None, :].to(tl.int64)
        keys = tl.where((columns < E)[None, :], keys, LOWEST)
        values = ()
        chosen = tl.zeros([TOKENS], tl.float32)
        for slot in tl.static_range(TOP_K):
            ids = 0xFFFF - (tl.max(keys, 1) & 0xFFFF).to(tl.int32)
            hit = columns[None, :] == ids[:, None]
            value = tl.sum(tl.where(hit, probabilities, 0.0), 1)
            values = values + (value,)
            chosen += value
            keys = tl.where(hit, LOWEST, keys)
            tl.store(experts + rows * TOP_K + slot, ids, mask=rows < num_tokens)
            total += tl.sum((hit & (rows < num_tokens)[:, None]).to(tl.int32), 0)
        for slot in tl.static_range(TOP_K):
            weight = values[slot] / chosen if NORMALISED else values[slot]
            weight = weight.to(weights.dtype.element_ty)
            tl.store(weights + rows * TOP_K + slot, weight, mask=rows < num_tokens)
    if COUNT:
        tl.store(counts + tl.program_id(0) * E + columns, total, mask=columns < E)


@triton.jit(do_not_specialize=["num_tokens", "steps", "tiles"])
def places_kernel(
    experts, counts, places, tile_experts, num_tokens, steps, tiles,
    E: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the places of steps * TOKENS tokens' entries, and describe a share of the tiles."""
    wait_for_previous(PDL)
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK_E)
    totals = tl.zeros([BLOCK_E], tl.int32)
    before = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_blocks, TOKENS):
        blocks = first + tl.arange(0, TOKENS)
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


def route(logits: torch.Tensor, top_k: int, normalised: bool, tile: int = 0) -> Routing:
    """Choose experts; see `nv_kernels.reference.route`. A logit that is NaN counts as the highest.

    Args:
        logits: [T, E], E at most 65,535.
        top_k: k, from 1 to E.
        normalised: divide the chosen probabilities by their sum.
        tile: a power of two, or 0.
    """
    logits = logits.contiguous()
    num_tokens, num_experts = logits.shape
    block_e = next_power_of_2(num_experts)
    tokens = max(1, min(MOST_TOKENS, ELEMENTS // block_e))
    steps = max(1, cdiv(num_tokens, tokens * MOST_BLOCKS))
    blocks = cdiv(num_tokens, tokens * steps)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=logits.device)

    experts, counts = integers(num_tokens, top_k), integers(blocks, num_experts)
    weights = torch.empty_like(experts, dtype=logits.dtype)
    options = dependent_launch(logits)
    if blocks:
        route_kernel[(blocks,)](
            logits, experts, weights, counts, num_tokens, steps, num_experts, top_k, normalised,
            tokens, block_e, tile > 0, num_warps=4, **options,
        )  # fmt: skip
    if not tile:
        return Routing(experts, weights, None, None, 0)
    tiles = num_tiles(num_tokens * top_k, num_experts, tile)
    places, tile_experts = integers(tiles * tile), integers(tiles)
    if blocks:
        places_kernel[(blocks,)](
            experts, counts, places, tile_experts, num_tokens, steps, tiles, num_experts, top_k,
            tile, tokens, block_e, num_warps=4, **options,
        )  # fmt: skip
    return Routing(experts, weights, places, tile_experts, tile)
