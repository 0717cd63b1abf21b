"""Experts of plain floats on a card.

Owns the choice of the height of tiles, by the number of tokens alone. With few tokens there are no
tiles: each program computes a part of one entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.linear.experts.products import expert_gated_linear, expert_linear
from nv_kernels.linear.experts.routing import route
from nv_kernels.linear.experts.weight import DenseExperts

if TYPE_CHECKING:
    import torch

    from nv_kernels.linear.experts.routing import Routing

LEAST_TILE, MOST_TILE = 16, 128
FIXED_TILE = 64
"""Entries per tile where a token's bits must not depend on the number of tokens."""


@dataclass(frozen=True)
class TritonExperts(DenseExperts):
    """Experts on a card. The sum over a token's experts is left to the next norm."""

    def route(self, logits: torch.Tensor, top_k: int, normalised: bool) -> Routing:
        """See `Experts.route`."""
        tile = tile_height(logits.shape[0] * top_k, logits.shape[1])
        return route(logits, top_k, normalised, tile)

    def partials(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """See `Experts.partials`."""
        gated = expert_gated_linear(x, self.gate_up, routing, self.gate_up_bias, self.gate)
        return expert_linear(gated, self.down, routing, self.down_bias)


@dataclass(frozen=True)
class BatchInvariantTritonExperts(TritonExperts):
    """Experts on a card whose products are dots of one shape for all numbers of tokens."""

    def route(self, logits: torch.Tensor, top_k: int, normalised: bool) -> Routing:
        """See `Experts.route`."""
        return route(logits, top_k, normalised, FIXED_TILE)


def tile_height(num_entries: int, num_experts: int) -> int:
    """Choose the entries per tile: about the mean per expert; 0 up to one entry per expert.

    Args:
        num_entries: T * k.
        num_experts: E.
    """
    if num_entries <= num_experts:
        return 0
    mean = next_power_of_2(cdiv(num_entries, num_experts))
    return min(MOST_TILE, max(LEAST_TILE, mean))


def dense_experts(plain: DenseExperts) -> TritonExperts:
    """Make experts; see `nv_kernels.linear.experts.weight.dense_experts`."""
    return TritonExperts(**vars(plain))


def batch_invariant_experts(plain: DenseExperts) -> TritonExperts:
    """Make experts; see `nv_kernels.linear.experts.weight.batch_invariant_experts`."""
    return BatchInvariantTritonExperts(**vars(plain))
