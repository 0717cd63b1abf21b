"""A mixture of experts in C++, of fp32 or bf16; the definitions for everything else.

Owns the layout of the experts' weights on a CPU. Each token is computed alone, so that its bits do
not depend on the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from nv_kernels.cpp.calls import has_form, kernel
from nv_kernels.cpp.linear import has_tiles, tiled
from nv_kernels.linear.experts import routing
from nv_kernels.linear.experts.routing import Routing
from nv_kernels.linear.experts.weight import DenseExperts

if TYPE_CHECKING:
    from collections.abc import Callable


def route(
    logits: torch.Tensor,
    top_k: int,
    normalised: bool,
    tile: int = 0,
    *,
    is_sorted: bool = True,
    dtype: torch.dtype | None = None,
) -> Routing:
    """Choose experts; see `nv_kernels.reference.route`. A logit that is NaN is never compared."""
    call = kernel("route", logits.dtype)
    is_choice = logits.dim() == 2 and 0 < top_k <= logits.shape[1]
    if call is None or tile or not is_choice:
        define = routing.route.definition
        return define(logits, top_k, normalised, tile, is_sorted=is_sorted, dtype=dtype)
    logits = logits.contiguous()
    experts = logits.new_empty(logits.shape[0], top_k, dtype=torch.int32)
    weights = torch.empty_like(experts, dtype=logits.dtype)
    outputs = (experts.data_ptr(), weights.data_ptr())
    call(logits.data_ptr(), *outputs, *logits.shape, top_k, normalised, torch.get_num_threads())
    return Routing(experts, weights)


@dataclass(frozen=True)
class CppExperts(DenseExperts):
    """Experts in the layout of the compiled kernels.

    Attributes:
        in_tiles: each expert's matrix is in tiles, as `nv_kernels.cpp.linear.pack_weight` makes it.
        call: the kernel.
    """

    in_tiles: bool = field(kw_only=True)
    call: Callable[..., None] = field(kw_only=True)

    def mix(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """See `Experts.mix`. The sum over a token's experts is in the same call."""
        if x.dtype != self.down.dtype or not fits(x, routing, self.down.shape[1]):
            return super().mix(x, routing)
        routing = readable(routing, x.dtype)
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        biases = (None if b is None else b.data_ptr() for b in (self.gate_up_bias, self.down_bias))
        limit = math.inf if self.gate.limit is None else self.gate.limit
        self.call(
            *(self.gate_up.data_ptr(), self.down.data_ptr(), *biases, *self.down.shape),
            *(self.in_tiles, self.gate.alpha, limit, self.gate.shift, x.data_ptr()),
            *(routing.experts.data_ptr(), routing.weights.data_ptr(), out.data_ptr()),
            *(*routing.experts.shape, torch.get_num_threads()),
        )
        return out


def fits(x: torch.Tensor, routing: Routing, width: int) -> bool:
    """Whether x is [T, width], and the routing one of T tokens."""
    experts, weights = routing.experts, routing.weights
    is_routing = experts.dim() == 2 and len(experts) == len(x) and weights.shape == experts.shape
    return is_routing and has_form(x, (len(x), width), x.dtype)


def readable(routing: Routing, dtype: torch.dtype) -> Routing:
    """Convert to what the kernels read: contiguous int32 and the tokens' dtype."""
    weights = routing.weights.to(dtype).contiguous()
    return Routing(routing.experts.int().contiguous(), weights)


def dense_experts(plain: DenseExperts) -> DenseExperts:
    """Make experts; see `nv_kernels.linear.experts.weight.dense_experts`."""
    tensors = [plain.gate_up, plain.down, plain.gate_up_bias, plain.down_bias]
    dtype = plain.down.dtype
    call = kernel("experts", dtype)
    if call is None or any(each is not None and each.dtype != dtype for each in tensors):
        return plain
    assert all(each is None or each.is_contiguous() for each in tensors)
    sizes = (*plain.gate_up.shape[1:], *plain.down.shape[1:])
    in_tiles = dtype == torch.bfloat16 and has_tiles() and not any(n % 32 for n in sizes)
    if in_tiles:
        _into_tiles(plain.gate_up)
        _into_tiles(plain.down)
    return CppExperts(**vars(plain), in_tiles=in_tiles, call=call)


batch_invariant_experts = dense_experts


def _into_tiles(matrices: torch.Tensor) -> None:
    """Lay [E, N, K] out in tiles, in place: a second copy of all experts may not fit in memory."""
    for matrix in matrices:
        matrix.copy_(tiled(matrix).view_as(matrix))
