"""The draw of a token from its logits: docs/architecture.md, "The draw".

Owns the definition that every sampler must reproduce up to rounding. Never keeps a generator:
a row's token depends on its logits, parameters, seed and position alone, so that neighbours in
the batch change nothing, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.reference.philox import uniform

if TYPE_CHECKING:
    from nv_kernels.sampling import SamplingTensors


def sample(logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """Pick one token a row.

    A token at -inf is never drawn. A row that offers nothing to draw from (all -inf, or a NaN
    or +inf among its logits) gets token 0 where it draws and any token where it is greedy.

    Args:
        logits: [R, V] fp32, bf16 or fp16.
        sampling: parameters of the R rows; rows mix freely.

    Returns:
        Token ids [R] int64.
    """
    greedy = logits.argmax(-1)
    if sampling.all_greedy:
        return greedy
    drawn = _draw(logits.float(), sampling)
    return torch.where(sampling.temperature > 0, drawn, greedy)


def _draw(logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    temperature = torch.where(sampling.temperature > 0, sampling.temperature, 1.0)
    highest = logits.amax(-1, keepdim=True)
    # Subtracting first keeps a tiny temperature from overflowing.
    weights = ((logits - highest) / temperature[:, None]).softmax(-1)  # [R, V]
    if not sampling.any_filter:
        return _invert(weights.cumsum(-1, dtype=torch.float64), sampling, 0)
    weights = torch.where(_kept(logits, weights, sampling), weights, 0.0)
    return _shrink(logits, weights, sampling)


def _kept(logits: torch.Tensor, weights: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """Mark what min-p and top-k leave, [R, V] bool; ties with the k-th are kept."""
    kept = weights >= sampling.min_p[:, None] * weights.amax(-1, keepdim=True)
    vocabulary = logits.shape[-1]
    top_k = sampling.top_k.long().clamp(max=vocabulary)
    most = int(top_k.max())
    if most == 0:
        return kept
    best = logits.topk(most, dim=-1).values  # [R, most], descending
    kth = best.gather(1, (top_k - 1).clamp(min=0)[:, None])  # [R, 1]
    return kept & ((logits >= kth) | (top_k == 0)[:, None])


def _shrink(logits: torch.Tensor, weights: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """Draw under top-p without a sort: a token outside the nucleus shrinks the set it came from.

    A token is in the nucleus if the mass strictly above it is less than p times the total. The
    set always holds the nucleus, so what is accepted at last is distributed as the nucleus is.
    """
    mass = weights.cumsum(-1, dtype=torch.float64)  # [R, V]
    tokens = _invert(mass, sampling, 0)
    limit = sampling.top_p.double() * mass[:, -1]  # [R]
    rows = torch.nonzero((sampling.top_p < 1) & (mass[:, -1] > 0)).flatten()
    draw = 0
    while rows.numel() > 0:
        lowest = logits[rows, tokens[rows]]
        above = torch.where(logits[rows] > lowest[:, None], weights[rows], 0.0)
        mass = above.cumsum(-1, dtype=torch.float64)  # [rows, V]
        outside = mass[:, -1] >= limit[rows]
        rows, mass, draw = rows[outside], mass[outside], draw + 1
        tokens[rows] = _invert(mass, sampling, draw, rows)
    return tokens


def _invert(
    mass: torch.Tensor, sampling: SamplingTensors, draw: int, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the first token whose cumulative mass exceeds u times the total; 0 without a mass.

    Args:
        mass: [R, V] float64, cumulative over ids.
        sampling: gives seeds and positions.
        draw: round of the uniform.
        rows: which rows of `sampling` mass holds; None: all.
    """
    seeds, positions = sampling.seeds, sampling.positions
    if rows is not None:
        seeds, positions = seeds[rows], positions[rows]
    total = mass[:, -1:]
    target = uniform(seeds, positions, draw)[:, None] * total
    tokens = torch.searchsorted(mass, target, right=True)
    return torch.where(total > 0, tokens, 0).flatten()
