"""The weights of a mixture of experts, which know their product.

    stream = experts.norm_add(stream, norm, router)

On a card, with one rank or with sums over ranks inside the norm, this is a norm and at most five
launches: the router's product, the choice, its order, and two products. With one or two tokens it
is four in all. With more the sum over a token's experts is left to the next norm.
`Experts` defines each method in plain ops; each device or format with its own kernels has a
subclass in a file of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nv_kernels.linear.experts.gate import SWIGLU
from nv_kernels.linear.experts.products import expert_gated_linear, expert_linear, sum_partials
from nv_kernels.linear.experts.routing import route
from nv_kernels.linear.stream import Stream, normalise
from nv_kernels.op import op

if TYPE_CHECKING:
    import torch

    from nv_kernels.linear.experts.gate import Gate
    from nv_kernels.linear.experts.routing import Routing
    from nv_kernels.linear.stream import Norm
    from nv_kernels.linear.weight import Weight
    from nv_kernels.ranks.peers import RankSum


class Scorer(Protocol):
    """The product that scores the experts, and how they are chosen by the scores."""

    @property
    def weight(self) -> Weight:
        """[E, K]: a logit for each expert."""

    @property
    def bias(self) -> torch.Tensor | None:
        """[E] or None."""

    @property
    def top_k(self) -> int:
        """Experts per token."""

    @property
    def is_normalised(self) -> bool:
        """Whether the chosen probabilities are divided by their sum."""


class Experts(ABC):
    """The matrices of E gated MLPs, of which each token uses k.

    A subclass must define `mix`. It overrides what it computes in fewer launches.
    """

    @abstractmethod
    def mix(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Compute each token's experts and their weighted sum: [T, K] -> [T, K]."""

    def route(
        self,
        logits: torch.Tensor,
        top_k: int,
        normalised: bool,
        dtype: torch.dtype | None = None,
    ) -> Routing:
        """Choose experts as `nk.route`, in the order that this object's products read."""
        return route(logits, top_k, normalised, dtype=dtype)

    def partials(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Mix for a consumer that sums partials: [T, K] -> [T, K], or [k, T, K] in x's dtype."""
        return self.mix(x, routing)

    def norm_add(
        self, stream: Stream, norm: Norm, router: Scorer, rank_sum: RankSum | None = None
    ) -> Stream:
        """Add the pending product, norm, choose, mix, and add to the stream as `linear_add`.

        Args:
            stream: the residual [T, K].
            norm: norm of the residual.
            router: reads the normed stream.
            rank_sum: sums over the ranks, which share out F; None with one rank.
        """
        normed, stream = normalise(stream, norm)
        logits = router.weight.partials(normed, router.bias)
        routing = self.route(logits, router.top_k, router.is_normalised, normed.dtype)
        return self.linear_add(normed, routing, stream, rank_sum)

    def linear_add(
        self,
        x: torch.Tensor,
        routing: Routing,
        stream: Stream,
        rank_sum: RankSum | None = None,
    ) -> Stream:
        """Mix, and add to the residual stream: at once, or pending until the next norm.

        Args:
            x: [T, K], the normed stream.
            routing: of these tokens, by this object's `route`.
            stream: [T, K] with nothing pending.
            rank_sum: sums over the ranks, which share out F; None with one rank.

        Returns:
            The stream [T, K]. Its `pending` may be partials, which `nk.normalise` sums.
        """
        if rank_sum is None:
            return Stream(stream.hidden, self.partials(x, routing))
        peers = rank_sum.peers_for(stream.hidden)
        if peers is not None:  # the next norm sums over the ranks
            return Stream(stream.hidden, self.partials(x, routing), peers)
        return Stream(stream.hidden, rank_sum(self.mix(x, routing)))


@dataclass(frozen=True)
class DenseExperts(Experts):
    """Experts of plain floats; a token's bits do not depend on the other tokens.

    Attributes:
        gate_up: [E, 2F, K], gate rows then up rows.
        down: [E, K, F].
        gate_up_bias: [E, 2F] or None.
        down_bias: [E, K] or None; of several ranks, one has it.
        gate: how the products of gate and up become one.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate: Gate = SWIGLU

    @property
    def device(self) -> torch.device:
        """The device that holds the matrices."""
        return self.down.device

    def mix(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """See `Experts.mix`."""
        gated = expert_gated_linear(x, self.gate_up, routing, self.gate_up_bias, self.gate)
        return sum_partials(expert_linear(gated, self.down, routing, self.down_bias))


@op(triton="nv_kernels.linear.experts.triton_weight", cpp="nv_kernels.cpp.experts")
def dense_experts(plain: DenseExperts) -> Experts:
    """Make the device's fastest experts of loaded floats.

    Their layout may be made in place: the caller must not use the tensors again.
    """
    return plain


@op(triton="nv_kernels.linear.experts.triton_weight", cpp="nv_kernels.cpp.experts")
def batch_invariant_experts(plain: DenseExperts) -> Experts:
    """Make batch-invariant experts of loaded floats; see `dense_experts`."""
    return plain
