"""The draw of a token in torch, made for CPUs: `sampling.draw` defines it.

A CPU's rows are drawn here unless the C++ takes them. Masses are added up in tiles, top-k reads the
few tiles that can hold the k highest logits, and rows go in parts that fit a core's cache. A row's
arithmetic does not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from nv_kernels.sampling.philox import uniforms
from nv_kernels.sampling.torch_candidates import find
from nv_kernels.sampling.torch_inversion import cumulative_mass, invert, tiled

if TYPE_CHECKING:
    from nv_kernels.sampling.parameters import SamplingTensors

MAX_PART = 2**18  # logits per pass: they fit a core's cache
NUM_AHEAD = 4  # rounds of top-p whose random numbers are made at once

SMALLEST = 1e-30  # least top_p: fp32 is too coarse below it; the most likely token stays


def sample(logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """Draw one token per row; see `nv_kernels.reference.sample`."""
    logits = logits[:, : sampling.num_ids]
    if not bool(sampling.temperature.any()):  # greedy rows only
        return torch.cat([_highest(part.float()) for part in torch.split(logits, _step(logits))])
    num_rounds = NUM_AHEAD if sampling.any_filter else 1
    u = uniforms(sampling.seeds, sampling.positions, 0, num_rounds)  # [R, num_rounds]
    step = _step(logits)
    if logits.shape[0] <= step:
        return _sample(logits.float(), u, sampling)
    parts = [slice(start, start + step) for start in range(0, logits.shape[0], step)]
    return torch.cat(
        [_sample(logits[part].float(), u[part], _rows(sampling, part)) for part in parts]
    )


def _step(logits: torch.Tensor) -> int:
    return max(1, MAX_PART // logits.shape[1])


def _rows(sampling: SamplingTensors, rows: slice | torch.Tensor) -> SamplingTensors:
    return replace(
        sampling,
        temperature=sampling.temperature[rows],
        top_k=sampling.top_k[rows],
        top_p=sampling.top_p[rows],
        min_p=sampling.min_p[rows],
        seeds=sampling.seeds[rows],
        positions=sampling.positions[rows],
    )


def _highest(logits: torch.Tensor) -> torch.Tensor:
    """Take the lowest id of each row's maximum, or -1; a NaN is the maximum of its row."""
    ids = logits.argmax(-1, keepdim=True)
    return torch.where(logits.gather(1, ids).isfinite(), ids, -1)[:, 0]


def _sample(logits: torch.Tensor, u: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    greedy = sampling.temperature == 0
    if sampling.any_filter:
        drawn = _draw_by_k(logits, u, sampling)
    else:
        drawn = _draw(logits, None, u, sampling)
    drawn = torch.where(logits.amax(-1).isfinite(), drawn, -1)
    return torch.where(greedy, _highest(logits), drawn) if bool(greedy.any()) else drawn


def _draw_by_k(logits: torch.Tensor, u: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """Draw rows of equal k together: the arithmetic of a row must not depend on another's k."""
    ks = sorted(set(sampling.top_k.tolist()))
    if len(ks) == 1:
        return _draw_top_k(logits, ks[0], u, sampling)
    tokens = torch.empty_like(sampling.seeds)
    for k in ks:
        rows = torch.nonzero(sampling.top_k == k).flatten()
        tokens[rows] = _draw_top_k(logits[rows], k, u[rows], _rows(sampling, rows))
    return tokens


def _draw_top_k(
    logits: torch.Tensor, k: int, u: torch.Tensor, sampling: SamplingTensors
) -> torch.Tensor:
    """Draw from each row's k highest logits and ties with the k-th; k 0 is off."""
    if k == 0 or k >= logits.shape[-1]:
        return _draw(logits, None, u, sampling)
    candidates = find(logits, k)
    if candidates is None:
        return _draw(logits, logits.topk(k, dim=-1).values[:, -1:], u, sampling)
    tokens = candidates.ids(_draw(candidates.logits, candidates.kth, u, sampling))
    rows = torch.nonzero(~candidates.complete).flatten()
    if rows.numel() > 0:
        kth = logits[rows].topk(k, dim=-1).values[:, -1:]
        tokens[rows] = _draw(logits[rows], kth, u[rows], _rows(sampling, rows))
    return tokens


def _draw(
    logits: torch.Tensor, kth: torch.Tensor | None, u: torch.Tensor, sampling: SamplingTensors
) -> torch.Tensor:
    """Draw under temperature, min-p and top-p from the logits not below kth [R, 1]."""
    temperature = torch.where(sampling.temperature > 0, sampling.temperature, 1.0)
    # Subtract first, so that a tiny temperature does not overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None])  # [R, V], <= 0
    if sampling.any_filter and bool((sampling.min_p > 0).any()):
        scaled.masked_fill_(scaled < sampling.min_p.log()[:, None], float("-inf"))
    if kth is not None:
        scaled.masked_fill_(logits < kth, float("-inf"))
    tiles = tiled(scaled.softmax(-1), 0.0)
    mass = cumulative_mass(tiles)
    tokens = invert(tiles, mass, u[:, 0])
    limit = sampling.top_p.double().clamp(min=SMALLEST) * mass[:, -1]  # [R], never 0
    rows = torch.nonzero((sampling.top_p < 1) & (mass[:, -1] > 0)).flatten()
    if rows.numel() > 0:
        tokens[rows] = _shrink(
            tokens[rows], logits[rows], tiles[rows], limit[rows], u[rows], _rows(sampling, rows)
        )
    return tokens


def _shrink(  # noqa: PLR0917
    tokens: torch.Tensor,
    logits: torch.Tensor,
    tiles: torch.Tensor,
    limit: torch.Tensor,
    u: torch.Tensor,
    sampling: SamplingTensors,
) -> torch.Tensor:
    """Redraw tokens outside top-p, without a sort.

    A token is in the nucleus if the mass strictly above it is less than the limit, p times the
    total. A token outside shrinks the set that it was drawn from to the tokens above it. This set
    always contains the nucleus, so the accepted token has the distribution of the nucleus.
    """
    accepted = tokens.clone()
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    draw = 0
    while True:
        lowest = logits.gather(1, tokens[:, None])[..., None]  # [rows, 1, 1]
        higher = tiled(logits, float("-inf")) > lowest  # [rows, N, TILE]
        tiles = torch.where(higher, tiles, 0.0)
        mass = cumulative_mass(tiles)
        outside = torch.nonzero(mass[:, -1] >= limit).flatten()
        if outside.numel() == 0:
            return accepted
        rows, draw = rows[outside], draw + 1
        logits, tiles, limit = logits[outside], tiles[outside], limit[outside]
        if draw < u.shape[1]:
            number = u[rows, draw]
        else:
            number = uniforms(sampling.seeds[rows], sampling.positions[rows], draw, 1)[:, 0]
        tokens = invert(tiles, mass[outside], number)
        accepted[rows] = tokens
