"""Ops that make the device's weight of a quantized record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nv_kernels.elementwise.gate import batch_invariant_silu_and_mul
from nv_kernels.linear.definitions import batch_invariant_linear
from nv_kernels.linear.head import batch_invariant_logits
from nv_kernels.linear.weight import Weight
from nv_kernels.op import op

if TYPE_CHECKING:
    import torch

    from nv_kernels.linear.quantized.record import Quantized


@dataclass(frozen=True)
class BatchInvariantQuantized(Weight):
    """A quantized weight by its definition; a token's bits do not depend on the other tokens.

    Attributes:
        record: codes and scales.
    """

    record: Quantized

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.linear`."""
        return self.record.product(x, batch_invariant_linear, bias).to(x.dtype)

    def gated_linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.gated_linear`."""
        return batch_invariant_silu_and_mul(self.linear(x, bias))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Weight.logits`."""
        return self.record.product(
            hidden, lambda x, values, _: batch_invariant_logits(x, values), None
        ).float()


@op(triton="nv_kernels.linear.triton.quantized_weight", cpp="nv_kernels.cpp.quantized_weight")
def quantized_weight(record: Quantized) -> Weight:
    """Make the device's fastest weight of a record.

    Its layout may replace the record's tensors: the caller must not use the record again.
    """
    return record


@op(triton="nv_kernels.linear.triton.quantized_weight", cpp="nv_kernels.cpp.quantized_weight")
def batch_invariant_quantized_weight(record: Quantized) -> Weight:
    """Make a batch-invariant weight of a record; see `quantized_weight`."""
    return BatchInvariantQuantized(record)
