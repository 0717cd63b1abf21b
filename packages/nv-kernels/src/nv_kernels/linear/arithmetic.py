"""Arithmetic: whether the bits of a token's result may depend on the other tokens of its step.

Owns the two kinds and their choices, which are made once, when a model is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nv_kernels.linear.experts.quantized import (
    batch_invariant_quantized_experts,
    quantized_experts,
)
from nv_kernels.linear.experts.weight import batch_invariant_experts, dense_experts
from nv_kernels.linear.head import pack_head
from nv_kernels.linear.quantized.weight import batch_invariant_quantized_weight, quantized_weight
from nv_kernels.linear.weight import (
    BatchInvariantDense,
    Dense,
    batch_invariant_weight,
    dense_weight,
)
from nv_kernels.ranks.peers import PeerBuffers, RankSum

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from nv_kernels.linear.experts.quantized import QuantizedExperts
    from nv_kernels.linear.experts.weight import DenseExperts, Experts
    from nv_kernels.linear.quantized.record import Quantized
    from nv_kernels.linear.weight import Weight


class RankGroup(Protocol):
    """The sums over a group of ranks; each sums a tensor in place and returns it."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum in any order."""

    def sum_in_order(self, x: torch.Tensor) -> torch.Tensor:
        """Sum in fp32, in order of rank."""

    @property
    def peers(self) -> PeerBuffers | None:
        """Buffers that the ranks write into each other, or None."""


@dataclass(frozen=True)
class Arithmetic:
    """One of the two kinds of arithmetic.

    Attributes:
        name: "fast" or "batch_invariant".
        attention_backend: the attention backend that it needs; "auto" if any will do.
        weight: makes a weight of loaded values [N, K], laid out as the device multiplies fastest.
        quantized: makes a weight of a record of codes and scales, laid out alike; it may replace
            the record's tensors.
        experts: makes the weights of a mixture of experts of loaded values, which it may
            overwrite, laid out as the device multiplies fastest.
        quantized_experts: makes them of records, which it may replace.
        head: makes the weight of the head, [V, E], whose product is `Weight.logits`.
        rank_sum: makes the sum over ranks that ends a layer's products.
    """

    name: str
    attention_backend: str
    weight: Callable[[torch.Tensor], Weight]
    quantized: Callable[[Quantized], Weight]
    experts: Callable[[DenseExperts], Experts]
    quantized_experts: Callable[[QuantizedExperts], Experts]
    head: Callable[[torch.Tensor], Weight]
    rank_sum: Callable[[RankGroup], RankSum]


def arithmetic(name: str) -> Arithmetic:
    """Return the kind of arithmetic of a name.

    Args:
        name: "fast", or "batch_invariant": a token's results are bitwise the same whatever else is
            in its step. (Fp32 on a CPU is batch-invariant in both.)

    Raises:
        ValueError: the name is another one.
    """
    for kind in (FAST, BATCH_INVARIANT):
        if name == kind.name:
            return kind
    raise ValueError(f'arithmetic is {name!r}: it must be "fast" or "batch_invariant"')


FAST = Arithmetic(
    name="fast",
    attention_backend="auto",
    weight=dense_weight,
    quantized=quantized_weight,
    experts=dense_experts,
    quantized_experts=quantized_experts,
    head=lambda values: Dense(pack_head(values)),
    rank_sum=lambda ranks: RankSum(ranks.all_reduce, ranks.peers),
)
BATCH_INVARIANT = Arithmetic(
    name="batch_invariant",
    attention_backend="batch_invariant",
    weight=batch_invariant_weight,
    quantized=batch_invariant_quantized_weight,
    experts=batch_invariant_experts,
    quantized_experts=batch_invariant_quantized_experts,
    head=lambda values: BatchInvariantDense(pack_head(values)),
    rank_sum=lambda ranks: RankSum(ranks.sum_in_order),  # NCCL's sums may round differently per row
)
