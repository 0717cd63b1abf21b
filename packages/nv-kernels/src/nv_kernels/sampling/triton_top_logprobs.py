"""Log-probabilities without a sort; only those that were asked for are written.

One pass over the logits writes each tile's highest logit and each group's mass. Then one program
per row takes the K most likely tokens one by one: the best of the best tile, whose maximum then
becomes its next one. Only K tiles are read again. The order of a sum does not depend on the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.launch.triton_previous import wait_for_previous
from nv_kernels.sampling.triton_draw import GROUP, LOG2E, NONE

TILE = 128
MOST = 128  # up to here the most likely ones are taken one by one; more come from a sort
LN2 = tl.constexpr(0.6931471805599453)
TAKEN = tl.constexpr(-(2**31))  # below the key of every logit


@triton.jit
def order_key(x):
    """Return an int32 that orders like the fp32 logit, -0 as 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def logit_statistics_kernel(
    logits, token_ids, tile_key, group_max, group_mass, group_above,
    stride, V, num_groups, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a group: each tile's highest logit as a key; maximum, mass, number above the token's."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = num_groups - 1 - tl.program_id(1)
    tiles = group * GROUP + tl.arange(0, GROUP)
    ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    line = logits + row * stride
    own = tl.load(line + tl.load(token_ids + row)).to(tl.float32)
    x = tl.load(line + ids, mask=ids < V, other=NONE).to(tl.float32)
    keys = tl.where(ids < V, order_key(x), TAKEN)
    tl.store(tile_key + row * (num_groups * GROUP) + tiles, tl.max(keys, 1))
    highest = tl.max(tl.max(x, 1), 0)
    base = tl.where(highest == NONE, 0.0, highest)
    mass = tl.sum(tl.sum(tl.exp2((x - base) * LOG2E), 1), 0)
    above = tl.sum(tl.sum((x > own).to(tl.int32), 1), 0)
    tl.store(group_max + row * num_groups + group, highest)
    tl.store(group_mass + row * num_groups + group, mass)
    tl.store(group_above + row * num_groups + group, above)


@triton.jit(do_not_specialize=["num_logprobs"])
def top_kernel(
    logits, token_ids, tile_key, group_max, group_mass, group_above,
    top_ids, logprobs, ranks, norms,
    stride, V, num_groups, num_logprobs,
    GROUPS: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row: the token's own entry, then the most likely ones, best first."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    groups = tl.arange(0, GROUPS)
    inside = groups < num_groups
    at = row * num_groups + groups
    maxima = tl.load(group_max + at, mask=inside, other=NONE)
    highest = tl.max(maxima, 0)
    masses = tl.load(group_mass + at, mask=inside, other=0.0)
    total = tl.sum(tl.where(masses > 0, masses * tl.exp2((maxima - highest) * LOG2E), masses), 0)
    log_total = tl.log2(total) * LN2
    above = tl.sum(tl.load(group_above + at, mask=inside, other=0), 0)
    token = tl.load(token_ids + row)
    own = tl.load(line + token).to(tl.float32)
    top_ids += row * (num_logprobs + 1)
    logprobs += row * (num_logprobs + 1)
    tl.store(norms + row * 2, highest)
    tl.store(norms + row * 2 + 1, log_total)
    tl.store(ranks + row, above.to(tl.int64) + 1)
    tl.store(top_ids, token)
    tl.store(logprobs, (own - highest) - log_total)
    tiles = tl.arange(0, TILES)
    num_tiles = num_groups * GROUP
    keys = tl.load(tile_key + row * num_tiles + tiles, mask=tiles < num_tiles, other=TAKEN)
    lanes = tl.arange(0, TILE)
    last_key = tl.full((), 2**31 - 1, tl.int32)
    last_id = tl.full((), -1, tl.int32)
    for index in range(num_logprobs):
        best = tl.max(keys, 0)
        tile = tl.min(tl.where(keys == best, tiles, TILES - 1), 0)
        ids = tile * TILE + lanes
        x = tl.load(line + ids, mask=ids < V, other=NONE).to(tl.float32)
        key = tl.where(ids < V, order_key(x), TAKEN)
        left = (key < last_key) | ((key == last_key) & (ids > last_id))
        last_id = tl.min(tl.where(left & (key == best), ids, V - 1), 0)
        last_key = best
        value = tl.max(tl.where(ids == last_id, x, NONE), 0)
        tl.store(top_ids + index + 1, last_id.to(tl.int64))
        tl.store(logprobs + index + 1, (value - highest) - log_total)
        left = (key < best) | ((key == best) & (ids > last_id))
        keys = tl.where(tiles == tile, tl.max(tl.where(left, key, TAKEN), 0), keys)


def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Look up tokens and the most likely ones, the lowest ids first among equals.

    Args:
        logits: [N, V] raw, fp32, bf16 or fp16; rows may be strided.
        token_ids: [N] int64.
        num_logprobs: K, at most V.

    Returns:
        token_ids [N, K + 1] int64, logprobs [N, K + 1] fp32, rank [N] int64, as in the definition.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    if num_logprobs <= MOST:
        return _launch(logits, token_ids, num_logprobs)[:3]
    top_ids, logprobs, ranks, norms = _launch(logits, token_ids, 0)
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_logprobs]
    more = (logits.gather(1, ids).float() - norms[:, :1]) - norms[:, 1:]
    return torch.cat([top_ids, ids], dim=1), torch.cat([logprobs, more], dim=1), ranks


def _launch(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the three results, and each row's highest logit and log of its mass: [N, 2]."""
    rows, vocabulary = logits.shape

    def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    num_groups = cdiv(vocabulary, TILE * GROUP.value)
    groups = next_power_of_2(num_groups)
    entries = num_logprobs + 1
    results = new(torch.int64, entries), new(torch.float32, entries), new(torch.int64)
    norms = new(torch.float32, 2)
    statistics = (
        new(torch.int32, num_groups * GROUP.value),
        new(torch.float32, num_groups),
        new(torch.float32, num_groups),
        new(torch.int32, num_groups),
    )
    sizes = (logits.stride(0), vocabulary, num_groups)
    options = dependent_launch(logits)
    if rows:
        token_ids = token_ids.contiguous()
        logit_statistics_kernel[(rows, num_groups)](
            logits, token_ids, *statistics, *sizes, TILE, num_warps=4, **options
        )
        top_kernel[(rows,)](
            logits, token_ids, *statistics, *results, norms, *sizes, num_logprobs,
            groups, groups * GROUP.value, TILE, num_warps=4, **options,
        )  # fmt: skip
    return *results, norms
