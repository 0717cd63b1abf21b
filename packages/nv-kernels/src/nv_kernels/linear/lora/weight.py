"""A weight with adapters of low rank beside it: each token's own, or none.

Owns the record of the adapters' matrices, and where their product joins that of the base: before
the gate, and before the sum over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from nv_kernels.linear.lora.products import lora_expand, lora_expand_gated, lora_shrink
from nv_kernels.linear.weight import Weight

if TYPE_CHECKING:
    import torch

    from nv_kernels.linear.lora.plan import LoraPlan


class LoraWeights(NamedTuple):
    """The matrices of S adapters for one product, each in a slot.

    Attributes:
        a: [S, parts * R, K], any stride between slots; zeros above an adapter's own rank.
        b: [S, N, R], likewise; the factor of the adapter is in it.
        part_rows: rows of each part of the product, N together.
    """

    a: torch.Tensor
    b: torch.Tensor
    part_rows: tuple[int, ...]


@dataclass(frozen=True)
class Adapted(Weight):
    """A weight and the adapters of one step's tokens.

    Attributes:
        base: the weight of all tokens.
        lora: the adapters.
        plan: which token has which.
    """

    base: Weight
    lora: LoraWeights
    plan: LoraPlan

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.linear`."""
        return self.added(self.base.linear(x, bias), x)

    def gated_linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.gated_linear`."""
        product, lora = self.base.linear(x, bias), self.lora
        hidden = lora_shrink(x, lora.a, self.plan)
        return lora_expand_gated(product, hidden, lora.b, lora.part_rows, self.plan)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Weight.logits`."""
        return self.added(self.base.logits(hidden), hidden)

    def added(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the adapters' products of x [T, K] to those of the base, which may change."""
        lora = self.lora
        hidden = lora_shrink(x, lora.a, self.plan)
        return lora_expand(product.contiguous(), hidden, lora.b, lora.part_rows, self.plan)
