"""Weights that know their product, and the three methods by which a decoder's layer uses them.

    qkv, stream = qkv_weight.norm_linear(stream, norm)
    ...                                                # q/k norm, rope, KV write, attention
    stream = output_weight.linear_add(attended, stream)
    gated, stream = gate_up_weight.norm_gated_linear(stream, norm)
    stream = down_weight.linear_add(gated, stream)

On a card with few tokens these are a layer's four launches.

`Weight` defines each method in plain ops. Each device or format with its own kernels has a subclass
in a file of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nv_kernels.elementwise.gate import batch_invariant_silu_and_mul, silu_and_mul
from nv_kernels.linear.definitions import (
    batch_invariant_linear,
    batch_invariant_partials,
    linear,
    pack_weight,
)
from nv_kernels.linear.head import batch_invariant_logits, logits
from nv_kernels.linear.stream import Stream, normalise
from nv_kernels.op import op

if TYPE_CHECKING:
    import torch

    from nv_kernels.linear.lora.plan import LoraPlan
    from nv_kernels.linear.lora.weight import LoraWeights
    from nv_kernels.linear.stream import Norm
    from nv_kernels.ranks.peers import RankSum


class Weight(ABC):
    """A matrix [N, K] that knows its product.

    A subclass must define `linear`. It overrides the methods that it computes in fewer launches or
    more exactly.
    """

    @abstractmethod
    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply: [T, K] -> [T, N], plus a bias [N]."""

    def partials(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply for a consumer that sums: [T, K] -> [T, N], or partials [P, T, N].

        Partials are in x's dtype or fp32. The product is their sum over P, in order and in fp32,
        rounded to x's dtype.
        """
        return self.linear(x, bias)

    def gated_linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply and gate: [T, K] -> silu(gate) * up [T, N / 2]; gate rows come first in N."""
        return silu_and_mul(self.linear(x, bias))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Multiply as a model's head: [R, E] -> [R, V] fp32; see `nk.logits`."""
        return self.linear(hidden).float()

    def norm_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """Add the pending product, norm, and multiply.

        On a card the product may come as partials [P, T, N], where a kernel splits K; whether it
        does depends on T. `nk.qk_norm_rope_store` sums them, and so does `nk.add_rms_norm`; no
        other op does. For any other consumer call `nk.normalise`, and then `linear`, whose result
        is always [T, N].

        Args:
            stream: the residual [T, K].
            norm: norm of the residual.
            bias: [N] or None.

        Returns:
            The product as `partials` returns it, and the stream with nothing pending.
        """
        normed, stream = normalise(stream, norm)
        return self.partials(normed, bias), stream

    def norm_gated_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """Add the pending product, norm, multiply by gate and up, and gate.

        Args:
            stream: the residual [T, K].
            norm: norm of the residual.
            bias: [N] or None.

        Returns:
            silu(gate) * up [T, N / 2], never as partials, and the stream with nothing pending.
        """
        normed, stream = normalise(stream, norm)
        return self.gated_linear(normed, bias), stream

    def linear_add(
        self,
        x: torch.Tensor,
        stream: Stream,
        bias: torch.Tensor | None = None,
        rank_sum: RankSum | None = None,
    ) -> Stream:
        """Multiply, and add to the residual stream: at once, or pending until the next norm.

        Args:
            x: [T, K].
            stream: [T, N] with nothing pending; its tensor may be overwritten.
            bias: [N] or None; with several ranks, one of them adds it.
            rank_sum: sums the product over the ranks; None with one rank.

        Returns:
            The stream [T, N]. Its `pending` may be partials, which `nk.normalise` sums.
        """
        return self.linear_pending(x, stream, bias, rank_sum)

    def linear_pending(
        self,
        x: torch.Tensor,
        stream: Stream,
        bias: torch.Tensor | None = None,
        rank_sum: RankSum | None = None,
    ) -> Stream:
        """Multiply as `linear_add`, and always leave the product pending: for `nk.norm_pending`."""
        if rank_sum is None:
            return Stream(stream.hidden, self.partials(x, bias))
        peers = rank_sum.peers_for(stream.hidden)
        if peers is not None:  # the next norm sums over the ranks
            return Stream(stream.hidden, self.partials(x, bias), peers)
        return Stream(stream.hidden, rank_sum(self.linear(x, bias)))

    def adapted(self, lora: LoraWeights, plan: LoraPlan) -> Weight:
        """This weight with the adapters of one step's tokens beside it.

        Args:
            lora: the adapters of this product.
            plan: which token has which.
        """
        from nv_kernels.linear.lora.weight import Adapted  # noqa: PLC0415  # which is a Weight

        return Adapted(self, lora, plan)


@dataclass(frozen=True)
class Dense(Weight):
    """A weight of plain floats.

    Attributes:
        values: [N, K], or the result of `pack_weight`.
    """

    values: torch.Tensor

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.linear`."""
        return linear(x, self.values, bias)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Weight.logits`."""
        return logits(hidden, self.values)


@dataclass(frozen=True)
class BatchInvariantDense(Dense):
    """A weight of plain floats; a token's bits do not depend on the other tokens."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.linear`."""
        return batch_invariant_linear(x, self.values, bias)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Weight.logits`."""
        return batch_invariant_logits(hidden, self.values)

    def partials(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.partials`."""
        return batch_invariant_partials(x, self.values, bias)

    def gated_linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.gated_linear`."""
        return batch_invariant_silu_and_mul(self.linear(x, bias))


@op(triton="nv_kernels.linear.triton.weight", cpp="nv_kernels.cpp.weight")
def dense_weight(values: torch.Tensor) -> Weight:
    """Make a weight of loaded floats [N, K], in the device's fastest layout."""
    return Dense(pack_weight(values))


@op(cpp="nv_kernels.cpp.weight")
def batch_invariant_weight(values: torch.Tensor) -> Weight:
    """Make a batch-invariant weight of loaded floats [N, K]."""
    return BatchInvariantDense(pack_weight(values))
