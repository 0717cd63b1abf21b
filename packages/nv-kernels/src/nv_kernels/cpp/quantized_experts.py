"""A mixture of experts whose matrices stay quantized, in C++: one call reads the records' tensors.

GGUF's blocks are used where they lie in the mapped file. Each token is computed alone; in bf16 the
kernel may depend on how many tokens chose an expert, unless the arithmetic is batch-invariant.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from nv_kernels.cpp.calls import kernel
from nv_kernels.cpp.experts import fits, readable
from nv_kernels.cpp.quantized_weight import QuantizedMatrix, matrix_of
from nv_kernels.linear.experts.quantized import QuantizedExperts
from nv_kernels.linear.quantized.grouped import Grouped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nv_kernels.linear.experts.routing import Routing
    from nv_kernels.linear.quantized.record import Quantized


@dataclass(frozen=True)
class CppQuantizedExperts(QuantizedExperts):
    """Records, multiplied by the compiled kernel in fp32 and bf16, by their definition elsewhere.

    Attributes:
        matrices: the addresses of the records' tensors, which must not move: an array of gates, of
            ups and of downs.
    """

    matrices: tuple[ctypes.Array[QuantizedMatrix], ...] = field(kw_only=True)

    def mix(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """See `Experts.mix`. The sum over a token's experts is in the same call."""
        call = kernel("experts_quantized", x.dtype)
        biases = self.gate_up_bias, self.down_bias
        if any(each is not None and each.dtype != x.dtype for each in biases):
            return super().mix(x, routing)
        if call is None or not fits(x, routing, self.downs[0].shape[0]):
            return super().mix(x, routing)
        routing = readable(routing, x.dtype)
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        limit = math.inf if self.gate.limit is None else self.gate.limit
        call(
            *(ctypes.addressof(each) for each in self.matrices),
            *(None if each is None else each.data_ptr() for each in biases),
            *(self.num_experts, *self.downs[0].shape, self.gate.alpha, limit, self.gate.shift),
            *(x.data_ptr(), routing.experts.data_ptr(), routing.weights.data_ptr()),
            *(out.data_ptr(), *routing.experts.shape, torch.get_num_threads()),
        )
        return out


def quantized_experts(plain: QuantizedExperts) -> QuantizedExperts:
    """Make experts; see `nv_kernels.linear.experts.quantized.quantized_experts`."""
    if kernel("experts_quantized", torch.float32) is None:
        return plain
    stacks = [_stack(records) for records in plain.records.values()]
    found = tuple(stack for stack in stacks if stack is not None)
    return plain if len(found) < len(stacks) else CppQuantizedExperts(**vars(plain), matrices=found)


def batch_invariant_quantized_experts(plain: QuantizedExperts) -> QuantizedExperts:
    """Make experts of which every row of x is multiplied in the same way."""
    made = quantized_experts(plain)
    if isinstance(made, CppQuantizedExperts):
        for stack in made.matrices:
            for matrix in stack:
                matrix.invariant = True
    return made


def _stack(records: Sequence[Quantized]) -> ctypes.Array[QuantizedMatrix] | None:
    """Describe records to the kernel; None if it does not take one of them."""
    matrices = [None if _is_ordered(record) else matrix_of(record) for record in records]
    found = [matrix for matrix in matrices if matrix is not None]
    if len(found) < len(records):
        return None
    return (QuantizedMatrix * len(found))(*found)


def _is_ordered(record: Quantized) -> bool:
    """Whether each matrix would read the columns of x in an order of its own."""
    return isinstance(record, Grouped) and record.order is not None
