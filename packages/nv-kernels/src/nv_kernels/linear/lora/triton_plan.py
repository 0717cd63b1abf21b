"""The sort of a step's tokens by adapter: one launch, a program for each adapter.

Each program counts the tokens of all adapters, so it knows where its own tiles begin. There are no
atomics: the order is the same every time.
"""

# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import next_power_of_2
from nv_kernels.launch.triton_previous import wait_and_hold
from nv_kernels.linear.experts.routing import num_tiles
from nv_kernels.linear.lora.plan import LoraPlan

ELEMENTS = 8192  # of a program's [tokens, adapters] at once
LEAST_TOKENS = 16


@triton.jit(do_not_specialize=["num_tokens", "tiles"])
def plan_kernel(
    adapters, places, tile_adapters, present, ready, num_tokens, tiles,
    S: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Place the tokens of one adapter; program S places those without one, and the empty tiles."""
    wait_and_hold(PDL)
    own = tl.program_id(0)
    columns = tl.arange(0, BLOCK_S)
    counts = tl.zeros([BLOCK_S], tl.int32)
    for first in range(0, num_tokens, TOKENS):
        at = first + tl.arange(0, TOKENS)
        found = tl.load(adapters + at, mask=at < num_tokens, other=BLOCK_S)
        found = tl.where(found < 0, S, found)
        counts += tl.sum((found[:, None] == columns[None, :]).to(tl.int32), 0)
    num_own_tiles = (counts + TILE - 1) // TILE
    start = tl.sum(tl.where(columns < own, num_own_tiles, 0), 0)
    count = tl.sum(tl.where(columns == own, counts, 0), 0)
    end = start + (count + TILE - 1) // TILE
    if own == S:
        end = tiles
    is_present = (counts > 0) & (columns < S)
    if own == S:
        tl.store(present, tl.sum(is_present.to(tl.int32), 0))
        tl.store(ready, 0)
        tl.store(ready + 1, 0)
    elif count > 0:
        tl.store(present + 1 + tl.sum((is_present & (columns < own)).to(tl.int32), 0), own)
    adapter = tl.where(own == S, -1, own)
    rows = tl.arange(0, TILE)
    for tile in range(start, end):
        tl.store(tile_adapters + tile, adapter)
        empty = (tile - start) * TILE + rows >= count
        tl.store(places + tile * TILE + rows, tl.full([TILE], -1, tl.int32), mask=empty)
    placed = start * TILE
    for first in range(0, num_tokens, TOKENS):
        at = first + tl.arange(0, TOKENS)
        found = tl.load(adapters + at, mask=at < num_tokens, other=BLOCK_S)
        is_own = (tl.where(found < 0, S, found) == own).to(tl.int32)
        tl.store(places + placed + tl.cumsum(is_own, 0) - is_own, at, mask=is_own == 1)
        placed += tl.sum(is_own, 0)


def lora_plan(
    adapters: torch.Tensor, num_adapters: int, tile: int, is_batch_invariant: bool = False
) -> LoraPlan:
    """Sort tokens; see `nv_kernels.reference.lora_plan`."""
    num_tokens = len(adapters)
    tiles = num_tiles(num_tokens, num_adapters + 1, tile)
    places = torch.empty(tiles * tile, dtype=torch.int32, device=adapters.device)
    tile_adapters = torch.empty(tiles, dtype=torch.int32, device=adapters.device)
    present = torch.empty(num_adapters + 1, dtype=torch.int32, device=adapters.device)
    ready = torch.empty(2, dtype=torch.int32, device=adapters.device)
    block_s = next_power_of_2(num_adapters + 1)
    most = max(ELEMENTS // block_s, LEAST_TOKENS)
    tokens = min(max(next_power_of_2(num_tokens), LEAST_TOKENS), most)
    plan_kernel[(num_adapters + 1,)](
        adapters, places, tile_adapters, present, ready, num_tokens, tiles, num_adapters, tile,
        tokens, block_s, num_warps=4, **dependent_launch(adapters),
    )  # fmt: skip
    return LoraPlan(
        adapters, places, tile_adapters, present, ready, tile, num_adapters, is_batch_invariant
    )
