"""The choice of experts for each token, and how a product finds the tokens of an expert.

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
        tile: entries per tile of a product; 0: a product visits the entries in their own order.
        places: [P * tile] int32, the entries in P tiles: a tile has entries of one expert in
            ascending order, padded with -1. None if the entries are not sorted.
        tile_experts: [P] int32, the expert of each tile; -1: the tile is empty. None likewise.
        slots: [E, T] int16, j of each expert's entry t * k + j, or -1: from these a product finds
            the entries of its expert. None if it does not.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    tile: int = 0
    places: torch.Tensor | None = None
    tile_experts: torch.Tensor | None = None
    slots: torch.Tensor | None = None


def num_tiles(num_entries: int, num_experts: int, tile: int) -> int:
    """Return P: the most tiles that this number of entries can need.

    Each expert that has entries wastes less than one tile.
    """
    used = min(num_entries, num_experts)
    return (num_entries + used * (tile - 1)) // tile


@op(triton="nv_kernels.linear.experts.triton_route", cpp="nv_kernels.cpp.experts")
def route(
    logits: torch.Tensor,
    top_k: int,
    normalised: bool,
    tile: int = 0,
    *,
    is_sorted: bool = True,
    dtype: torch.dtype | None = None,
) -> Routing:
    """Choose the k likeliest experts of each token (Shazeer et al. 2017, arXiv 1701.06538).

    Of experts with equal logits the lower id is chosen first, on every device. (torch.topk, which
    transformers calls, leaves the order of equal values open.)

    Args:
        logits: [T, E] of the router, in the model's dtype; or [P, T, E] partials, which are summed
            in fp32, in order, and rounded to it.
        top_k: k, from 1 to E.
        normalised: divide the chosen probabilities by their sum, in fp32.
        tile: entries per tile, or 0 to leave the entries in their own order.
        is_sorted: with tiles, whether entries are sorted into them, or slots are given.
        dtype: the model's, where logits are partials; None: their own.

    Returns:
        The routing. Its weights are the softmax in fp32 over all experts, rounded at the end.
    """
    if logits.dim() == 3:
        logits = _sum(logits).to(dtype or logits.dtype)
    probabilities = logits.softmax(-1, dtype=torch.float32)
    experts = torch.sort(logits.float(), stable=True, dim=-1, descending=True).indices[:, :top_k]
    weights = probabilities.gather(1, experts)  # [T, k]
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    routing = Routing(experts.int(), weights.to(logits.dtype), tile)
    if not tile:
        return routing
    if not is_sorted:
        return routing._replace(slots=_slots(experts, logits.shape[1]))
    places, tile_experts = _tiles(experts, logits.shape[1], tile)
    return routing._replace(places=places, tile_experts=tile_experts)


def _sum(partials: torch.Tensor) -> torch.Tensor:
    """Sum [P, T, E] over P in fp32, in order."""
    total = partials[0].float()
    for part in partials[1:]:
        total = total + part
    return total


def _slots(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the slot of each expert [E] in each token's choice [T], or -1."""
    tokens, top_k = experts.shape
    slots = experts.new_full((tokens, num_experts), -1, dtype=torch.int16)
    order = torch.arange(top_k, dtype=torch.int16, device=experts.device)
    return slots.scatter_(1, experts, order.expand(tokens, -1)).t().contiguous()


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
