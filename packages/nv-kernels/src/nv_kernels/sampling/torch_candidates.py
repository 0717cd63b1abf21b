"""Finds the few tiles of a row that hold its k highest logits.

With it top-k sampling passes over the whole vocabulary only once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nv_kernels.sampling.torch_inversion import TILE, tiled

NUM_SPARE = 16  # tiles beyond k, for ties with the k-th logit


@dataclass(frozen=True)
class Candidates:
    """Part of each row's logits, in order of id.

    Attributes:
        logits: [R, C * TILE].
        tiles: [R, C] the number of the tile that each TILE logits come from.
        kth: [R, 1] the k-th highest logit of the row.
        complete: [R] bool; True if all logits of at least kth are present.
    """

    logits: torch.Tensor
    tiles: torch.Tensor
    kth: torch.Tensor
    complete: torch.Tensor

    def ids(self, places: torch.Tensor) -> torch.Tensor:
        """Convert places [R] in rows of `logits` to token ids [R]."""
        tile = self.tiles.gather(1, (places // TILE)[:, None])[:, 0]
        return tile * TILE + places % TILE


def find(logits: torch.Tensor, k: int) -> Candidates | None:
    """Take the tiles with the highest maxima: k of them hold the k highest logits.

    Each of the k taken tiles has a maximum at least as high as every logit of a tile that is not
    taken, so k logits are at least as high as those.

    Args:
        logits: [R, V].
        k: 1 or more.

    Returns:
        The candidates, or None if they would not be a small part of the row.
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
