"""The choice of experts for each token, and the order in which products visit the tokens.

Owns the rule for ties, the record, and the number of tiles, which depends on shapes alone: the host
never reads which experts were chosen, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nv_kernels.launch.sizes import cdiv
from nv_kernels.op import op


class Routing(NamedTuple):
    """The experts of each token. An entry is one expert of one token: entry t * k + j.

    Attributes:
        experts: [T, k] int32, the likeliest first.
        weights: [T, k] in the logits' dtype, by which the experts' results are multiplied.
        places: [P * tile] int32, the entries in P tiles: a tile has entries of one expert in
            ascending order, padded with -1. None if tile is 0.
        tile_experts: [P] int32, the expert of each tile; -1: the tile is empty. None if tile is 0.
        tile: entries per tile; 0: a product visits the entries in their own order.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    places: torch.Tensor | None
    tile_experts: torch.Tensor | None
    tile: int


def num_tiles(num_entries: int, num_experts: int, tile: int) -> int:
    """Return P: the most tiles that this number of entries can need.

    Each expert that has entries wastes less than one tile.
    """
    used = min(num_entries, num_experts)
    return (num_entries + used * (tile - 1)) // tile


@op(triton="nv_kernels.linear.experts.triton_route", cpp="nv_kernels.cpp.experts")
def route(logits: torch.Tensor, top_k: int, normalised: bool, tile: int = 0) -> Routing:
    """Choose the k likeliest experts of each token (Shazeer et al. 2017, arXiv 1701.06538).

    Of experts with equal logits the lower id is chosen first, on every device. (torch.topk, which
    transformers calls, leaves the order of equal values open.)

    Args:
        logits: [T, E] of the router, in the model's dtype.
        top_k: k, from 1 to E.
        normalised: divide the chosen probabilities by their sum, in fp32.
        tile: entries per tile, or 0 to leave the entries in their own order.

    Returns:
        The routing. Its weights are the softmax in fp32 over all experts, rounded at the end.
    """
    probabilities = logits.softmax(-1, dtype=torch.float32)
    experts = torch.sort(logits.float(), stable=True, dim=-1, descending=True).indices[:, :top_k]
    weights = probabilities.gather(1, experts)  # [T, k]
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    places, tile_experts = _tiles(experts, logits.shape[1], tile) if tile else (None, None)
    return Routing(experts.int(), weights.to(logits.dtype), places, tile_experts, tile)


def _tiles(experts: torch.Tensor, num_experts: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the entries by expert, each expert padded to whole tiles."""
    expert_of = experts.reshape(-1)  # [T * k]
    tiles = num_tiles(len(expert_of), num_experts, tile)
    places = expert_of.new_full((tiles, tile), -1, dtype=torch.int32)
    tile_experts = expert_of.new_full((tiles,), -1, dtype=torch.int32)
    first = 0
    for expert in range(num_experts):
        entries = (expert_of == expert).nonzero()[:, 0].int()
        last = first + cdiv(len(entries), tile)
        places[first:last].view(-1)[: len(entries)] = entries
        tile_experts[first:last] = expert
        first = last
    return places.view(-1), tile_experts
