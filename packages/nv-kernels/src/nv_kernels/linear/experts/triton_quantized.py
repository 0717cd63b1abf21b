"""Experts of codes on a card.

With one or two tokens, each program multiplies a single token by a matrix of one expert. With
more, the products are in tiles, as in `triton_weight`. For every number of tokens, the next norm
sums over a token's experts: a layer is a norm and four or five launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nv_kernels.linear.experts.code_stack import lay_out_stack
from nv_kernels.linear.experts.products import sum_partials
from nv_kernels.linear.experts.routing import route
from nv_kernels.linear.experts.triton_code_tiles import code_tiles
from nv_kernels.linear.experts.triton_weight import FIXED_TILE, fast_route
from nv_kernels.linear.experts.weight import Experts

if TYPE_CHECKING:
    import torch

    from nv_kernels.linear.experts.code_stack import CodeStack
    from nv_kernels.linear.experts.gate import Gate
    from nv_kernels.linear.experts.quantized import QuantizedExperts
    from nv_kernels.linear.experts.routing import Routing


@dataclass(frozen=True)
class TritonQuantizedExperts(Experts):
    """Experts of codes.

    Attributes:
        gate_up: gate and up of each expert, two matrices [F, K].
        down: of each expert, [K, F].
        gate_up_bias: [E, 2F] or None.
        down_bias: [E, K] or None.
        gate: how the products of gate and up become one.
    """

    gate_up: CodeStack
    down: CodeStack
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    gate: Gate

    @property
    def num_bytes(self) -> int:
        """Bytes of all codes and scales."""
        return self.gate_up.num_bytes + self.down.num_bytes

    def route(
        self,
        logits: torch.Tensor,
        top_k: int,
        normalised: bool,
        dtype: torch.dtype | None = None,
    ) -> Routing:
        """See `Experts.route`."""
        return fast_route(logits, top_k, normalised, dtype)

    def mix(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """See `Experts.mix`."""
        return sum_partials(self.partials(x, routing))

    def partials(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """See `Experts.partials`."""
        gated = code_tiles(x.contiguous(), self.gate_up, self.gate_up_bias, routing, self.gate)
        return code_tiles(gated, self.down, self.down_bias, routing, None, is_after_gated=True)


@dataclass(frozen=True)
class BatchInvariantTritonQuantizedExperts(TritonQuantizedExperts):
    """The same, in tiles of one shape for all numbers of tokens."""

    def route(
        self,
        logits: torch.Tensor,
        top_k: int,
        normalised: bool,
        dtype: torch.dtype | None = None,
    ) -> Routing:
        """See `Experts.route`."""
        return route(logits, top_k, normalised, FIXED_TILE, dtype=dtype)


def quantized_experts(plain: QuantizedExperts) -> Experts:
    """Make experts; see `nv_kernels.linear.experts.quantized.quantized_experts`."""
    return _made(plain, TritonQuantizedExperts)


def batch_invariant_quantized_experts(plain: QuantizedExperts) -> Experts:
    """Make experts; see `nv_kernels.linear.experts.quantized`."""
    return _made(plain, BatchInvariantTritonQuantizedExperts)


def _made(plain: QuantizedExperts, kind: type[TritonQuantizedExperts]) -> Experts:
    """Lay the records out; the experts themselves if no kernel takes them."""
    pairs = zip(plain.gates, plain.ups, strict=True)
    gate_up = lay_out_stack([record for pair in pairs for record in pair])
    down = lay_out_stack(plain.downs)
    if gate_up is None or down is None:
        return plain
    return kind(gate_up, down, plain.gate_up_bias, plain.down_bias, plain.gate)
