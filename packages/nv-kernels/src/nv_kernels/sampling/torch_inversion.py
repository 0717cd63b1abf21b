"""Picks an id from weights by inverting their cumulative mass, over tiles.

Owns the sums: fp32 within a tile, float64 across tiles, so that one draw reads the weights once.
A row's sums do not depend on the other rows.
"""

from __future__ import annotations

import torch
from torch.nn import functional

TILE = 128


def tiled(x: torch.Tensor, filler: float) -> torch.Tensor:
    """Split [R, V] into tiles [R, N, TILE]; the last one is padded with `filler`."""
    missing = -x.shape[-1] % TILE
    if missing:
        x = functional.pad(x, (0, missing), value=filler)
    return x.view(x.shape[0], x.shape[1] // TILE, TILE)


def cumulative_mass(tiles: torch.Tensor) -> torch.Tensor:
    """Add up tiles [R, N, TILE] of weights >= 0 to running totals [R, N] in float64."""
    return tiles.sum(-1).cumsum(-1, dtype=torch.float64)


def invert(tiles: torch.Tensor, mass: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Find the first id whose cumulative mass exceeds u times the total.

    Args:
        tiles: [R, N, TILE] fp32 weights >= 0.
        mass: [R, N] float64, `cumulative_mass(tiles)`.
        u: [R] float64 in [0, 1).

    Returns:
        [R] int64, an id of positive weight; 0 where the total is 0 or NaN.
    """
    rows = torch.arange(tiles.shape[0], device=tiles.device)
    total = mass[:, -1]
    target = (u * total)[:, None]
    tile = torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[1] - 1)  # [R, 1]
    before = torch.where(tile > 0, mass.gather(1, (tile - 1).clamp_(min=0)), 0.0)
    inside = tiles[rows, tile[:, 0]].cumsum(-1, dtype=torch.float64)  # [R, TILE]
    # The tile's own sum may be smaller, by rounding, than the difference of the running totals.
    last = torch.nextafter(inside[:, -1:], torch.zeros_like(target))
    offset = torch.searchsorted(inside, torch.minimum(target - before, last), right=True)
    return torch.where(total > 0, (tile * TILE + offset)[:, 0], 0)
