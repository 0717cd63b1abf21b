"""Experts of plain floats on a card.

Owns the choice of kernels, by the number of tokens alone. With one or two tokens the norm is in the
first product, and the residual in the last. The entries of more than `MOST_SLOTS` tokens are
sorted; with fewer, each program finds those of its expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.linear.experts.routing import route
from nv_kernels.linear.experts.triton_few import few_down, few_gated
from nv_kernels.linear.experts.triton_tiles import tiles
from nv_kernels.linear.experts.weight import DenseExperts
from nv_kernels.linear.stream import Stream

if TYPE_CHECKING:
    import torch

    from nv_kernels.linear.experts.routing import Routing
    from nv_kernels.linear.experts.weight import Scorer
    from nv_kernels.linear.stream import Norm
    from nv_kernels.ranks.peers import RankSum

FEW_TOKENS = 2
MOST_SLOTS, MOST_SLOTS_TILE = 128, 64
LEAST_TILE, MOST_TILE = 16, 128
FIXED_TILE = 64
"""Entries per tile where a token's bits must not depend on the number of tokens."""


@dataclass(frozen=True)
class TritonExperts(DenseExperts):
    """Experts on a card. From 3 tokens on the sum over a token's experts is in the next norm."""

    def norm_add(
        self, stream: Stream, norm: Norm, router: Scorer, rank_sum: RankSum | None = None
    ) -> Stream:
        """See `Experts.norm_add`. With few tokens nothing stays pending, if there is one rank."""
        if not 0 < stream.hidden.shape[0] <= FEW_TOKENS:
            return super().norm_add(stream, norm, router, rank_sum)
        logits, (x, *_) = router.weight.norm_linear(stream, norm, router.bias)
        routing = self.route(logits, router.top_k, router.is_normalised, x.dtype)
        gated = few_gated(
            x, self.gate_up, self.gate_up_bias, routing, self.gate, norm, is_after_choice=True
        )
        residual = x if rank_sum is None else None
        total = few_down(gated, self.down, self.down_bias, routing, residual, is_after_gated=True)
        if rank_sum is None:
            return Stream(total)
        peers = rank_sum.peers_for(x)
        if peers is not None:  # the next norm sums over the ranks
            return Stream(x, total, peers)
        return Stream(x, rank_sum(total))

    def route(
        self,
        logits: torch.Tensor,
        top_k: int,
        normalised: bool,
        dtype: torch.dtype | None = None,
    ) -> Routing:
        """See `Experts.route`."""
        return fast_route(logits, top_k, normalised, dtype)

    def partials(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """See `Experts.partials`."""
        return in_tiles(self, x, routing) if routing.tile else self.mix(x, routing)


@dataclass(frozen=True)
class BatchInvariantTritonExperts(DenseExperts):
    """Experts on a card whose products are dots of one shape for all numbers of tokens."""

    def route(
        self,
        logits: torch.Tensor,
        top_k: int,
        normalised: bool,
        dtype: torch.dtype | None = None,
    ) -> Routing:
        """See `Experts.route`."""
        return route(logits, top_k, normalised, FIXED_TILE, dtype=dtype)

    def partials(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """See `Experts.partials`."""
        return in_tiles(self, x, routing)


def in_tiles(by: DenseExperts, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Multiply by tiles, one kernel after the other: [T, K] -> [k, T, K]."""
    gated = tiles(x.contiguous(), by.gate_up, by.gate_up_bias, routing, by.gate)
    return tiles(gated, by.down, by.down_bias, routing, None, is_after_gated=True)


def fast_route(
    logits: torch.Tensor, top_k: int, normalised: bool, dtype: torch.dtype | None
) -> Routing:
    """Choose experts as `nk.route`; the number of entries decides how a product finds them."""
    num_tokens, num_experts = logits.shape[-2:]
    if num_tokens <= FEW_TOKENS:
        return route(logits, top_k, normalised, dtype=dtype)
    tile = tile_height(num_tokens * top_k, num_experts)
    if num_tokens > MOST_SLOTS:
        return route(logits, top_k, normalised, tile, dtype=dtype)
    tile = min(tile, MOST_SLOTS_TILE)
    return route(logits, top_k, normalised, tile, is_sorted=False, dtype=dtype)


def tile_height(num_entries: int, num_experts: int) -> int:
    """Choose the entries per tile: about the mean per expert.

    Args:
        num_entries: T * k.
        num_experts: E.
    """
    mean = next_power_of_2(cdiv(num_entries, num_experts))
    return min(MOST_TILE, max(LEAST_TILE, mean))


def dense_experts(plain: DenseExperts) -> TritonExperts:
    """Make experts; see `nv_kernels.linear.experts.weight.dense_experts`."""
    return TritonExperts(**vars(contiguous(plain)))


def batch_invariant_experts(plain: DenseExperts) -> BatchInvariantTritonExperts:
    """Make experts; see `nv_kernels.linear.experts.weight.batch_invariant_experts`."""
    return BatchInvariantTritonExperts(**vars(contiguous(plain)))


def contiguous(plain: DenseExperts) -> DenseExperts:
    """Return the experts with matrices whose rows lie one after the other, as the kernels read."""
    gate_up, down = plain.gate_up.contiguous(), plain.down.contiguous()
    return replace(plain, gate_up=gate_up, down=down)
