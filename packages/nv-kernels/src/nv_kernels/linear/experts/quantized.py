"""A mixture of experts whose matrices stay quantized: each is a record of codes and scales.

Owns the definition: every product is that of the matrix's own record, so that records that quantize
their inputs quantize the tokens, and what the gate returns, here too. Owns the ops that make the
device's experts. Never the layout that a device multiplies fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nv_kernels.linear.experts.gate import SWIGLU
from nv_kernels.linear.experts.products import by_expert, of_entries, sum_partials, weighted
from nv_kernels.linear.experts.weight import Experts
from nv_kernels.linear.quantized.fp8 import Fp8
from nv_kernels.linear.quantized.int8 import Int8
from nv_kernels.linear.quantized.weight import BatchInvariantQuantized
from nv_kernels.op import op

if TYPE_CHECKING:
    from nv_kernels.linear.experts.gate import Gate
    from nv_kernels.linear.experts.routing import Routing
    from nv_kernels.linear.quantized.record import Quantized


@dataclass(frozen=True)
class QuantizedExperts(Experts):
    """Experts of records; a token's bits do not depend on the other tokens.

    A product is rounded to the tokens' dtype, gated or multiplied by the routing's weight, and
    rounded again, as `nk.expert_gated_linear` and `nk.expert_linear` round.

    Attributes:
        gates: E records [F, K], alike in class and in how they quantize their inputs.
        ups: E records [F, K], likewise.
        downs: E records [K, F], likewise.
        gate_up_bias: [E, 2F] or None.
        down_bias: [E, K] or None; of several ranks, one has it.
        gate: how the products of gate and up become one.
    """

    gates: tuple[Quantized, ...]
    ups: tuple[Quantized, ...]
    downs: tuple[Quantized, ...]
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate: Gate = SWIGLU

    def __post_init__(self) -> None:
        """Refuse records that do not fit together."""
        for name, records in self.records.items():
            kinds = {(type(each).__name__, each.shape, inputs_of(each)) for each in records}
            if len(records) != self.num_experts or len(kinds) != 1:
                raise ValueError(
                    f"{name} has {len(records)} records of {sorted(map(str, kinds))}: there must "
                    f"be {self.num_experts}, alike in class, shape and inputs"
                )

    @property
    def records(self) -> dict[str, tuple[Quantized, ...]]:
        """The three stacks by name."""
        return {"gates": self.gates, "ups": self.ups, "downs": self.downs}

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.downs)

    @property
    def device(self) -> torch.device:
        """The device that holds the codes."""
        return self.downs[0].device

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        return sum(each.num_bytes for records in self.records.values() for each in records)

    def mix(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """See `Experts.mix`. Only matrices that have tokens are dequantized."""
        size, width = self.downs[0].shape
        entries, count = of_entries(x, routing), self.num_experts
        gated = by_expert(entries, routing, count, width, self._gated)
        products = by_expert(gated, routing, count, size, self._last)
        return sum_partials(weighted(products, routing))

    def _gated(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """Multiply by gate and up of an expert, and gate: [n, K] -> [n, F]."""
        bias = self.gate_up_bias
        first, second = (None, None) if bias is None else bias[expert].chunk(2)
        gate = BatchInvariantQuantized(self.gates[expert]).linear(rows, first)
        up = BatchInvariantQuantized(self.ups[expert]).linear(rows, second)
        return self.gate(torch.cat((gate, up), dim=1))

    def _last(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """Multiply by an expert's last matrix: [n, F] -> [n, K]."""
        bias = None if self.down_bias is None else self.down_bias[expert]
        return BatchInvariantQuantized(self.downs[expert]).linear(rows, bias)


def inputs_of(record: Quantized) -> str | float | None:
    """Return how a record's product quantizes x, as `nk.Fp8` has it; None: not at all."""
    if isinstance(record, Fp8):
        return record.inputs
    return "token" if isinstance(record, Int8) else None


@op(triton="nv_kernels.linear.experts.triton_quantized", cpp="nv_kernels.cpp.quantized_experts")
def quantized_experts(plain: QuantizedExperts) -> Experts:
    """Make the device's fastest experts of records.

    Their layout may replace the records' tensors: the caller must not use the records again.
    """
    return plain


@op(triton="nv_kernels.linear.experts.triton_quantized", cpp="nv_kernels.cpp.quantized_experts")
def batch_invariant_quantized_experts(plain: QuantizedExperts) -> Experts:
    """Make batch-invariant experts of records; see `quantized_experts`."""
    return plain
