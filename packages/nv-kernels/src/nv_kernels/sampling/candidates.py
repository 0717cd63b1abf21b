"""Finds the few tiles of a row that hold its k highest logits.

Owns the search, which spares top-k sampling all passes over the vocabulary but one. Never draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nv_kernels.sampling.inversion import TILE, tiled

NUM_SPARE = 16  # tiles beyond k: room for ties with the k-th


@dataclass(frozen=True)
class Candidates:
    """Part of each row's logits, in order of id.

    Attributes:
        logits: [R, C * TILE].
        tiles: [R, C] which tile each TILE logits are.
        kth: [R, 1] the k-th highest logit of the row.
        complete: [R] bool; no logit from kth upwards is missing.
    """

    logits: torch.Tensor
    tiles: torch.Tensor
    kth: torch.Tensor
    complete: torch.Tensor

    def ids(self, places: torch.Tensor) -> torch.Tensor:
        """Turn places [R] in a row of `logits` into token ids [R]."""
        tile = self.tiles.gather(1, (places // TILE)[:, None])[:, 0]
        return tile * TILE + places % TILE


def find(logits: torch.Tensor, k: int) -> Candidates | None:
    """Take the tiles of highest maximum: k of them hold the k highest logits.

    An element above all of a tile that was not taken has at least k others beside it, the maxima
    of those that were.

    Args:
        logits: [R, V].
        k: 1 or more.

    Returns:
        The candidates, or None where they would be no small part of the row.
    """
    every = tiled(logits, float("-inf"))  # [R, N, TILE]
    count = k + NUM_SPARE
    if count * 4 > every.shape[1]:
        return None
    best = every.amax(-1).topk(count + 1, dim=-1)
    tiles = best.indices[:, :count].sort(dim=-1).values
    rows = torch.arange(logits.shape[0], device=logits.device)[:, None]
    chosen = every[rows, tiles].flatten(1)  # [R, count * TILE]
    kth = chosen.topk(k, dim=-1).values[:, -1:]
    missed = best.values[:, -1:]
    return Candidates(chosen, tiles, kth, (missed < kth)[:, 0])
