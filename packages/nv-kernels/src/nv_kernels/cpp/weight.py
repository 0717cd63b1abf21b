"""A dense weight on a CPU: an op of a layer is one call of the compiled kernels.

Rows go through a norm and its product in blocks, so that the normed rows stay in the cache. A row's
result does not depend on the other rows.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nv_kernels.cpp.adapted import CppAdapted
from nv_kernels.cpp.calls import has_form, kernel
from nv_kernels.cpp.linear import (
    fits,
    is_in_tiles,
    multiplied,
    name_of,
    pack_weight,
    sizes_of,
)
from nv_kernels.linear.stream import Stream
from nv_kernels.linear.weight import BatchInvariantDense, Dense

if TYPE_CHECKING:
    from collections.abc import Callable

    from nv_kernels.cpp.quantized_weight import QuantizedMatrix
    from nv_kernels.linear.lora.plan import LoraPlan
    from nv_kernels.linear.lora.weight import LoraWeights
    from nv_kernels.linear.stream import Norm


class Matrix(ctypes.Structure):
    """The struct of a weight that `norm_linear.h` declares."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_columns", ctypes.c_int64),
        ("in_tiles", ctypes.c_int64),
    )


@dataclass(frozen=True)
class CppDense(Dense):
    """A weight of floats in the layout of the compiled kernels.

    Attributes:
        matrix: address of the values, which must not move.
        linear_call: the kernel of `linear`.
        norm_linear_call: the kernel of `norm_linear`.
        norm_gated_linear_call: the kernel of `norm_gated_linear`.
    """

    matrix: Matrix
    linear_call: Callable[..., None]
    norm_linear_call: Callable[..., None]
    norm_gated_linear_call: Callable[..., None]

    @classmethod
    def of(cls, values: torch.Tensor) -> CppDense | None:
        """Make the weight, or return None if the kernels do not support these values.

        For many rows, torch multiplies bf16 values that are not in tiles faster.
        """
        in_tiles, dtype = is_in_tiles(values), values.dtype
        linear_call = kernel(name_of(values), dtype, dtype)
        normed_call, gated_call = kernel("norm_linear", dtype), kernel("norm_gated_linear", dtype)
        if linear_call is None or normed_call is None or gated_call is None:
            return None
        if values.is_mkldnn or not values.is_contiguous():
            return None
        if dtype != torch.float32 and not in_tiles:
            return None
        matrix = Matrix(values.data_ptr(), *sizes_of(values), in_tiles)
        return cls(values, matrix, linear_call, normed_call, gated_call)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.linear`."""
        dtype, by = self.values.dtype, self.matrix
        if x.dtype != dtype or not fits(x, bias, by.num_outputs, by.num_columns):
            return super().linear(x, bias)
        return multiplied(self.linear_call, x, by.values, by.num_outputs, bias=bias, dtype=dtype)

    def norm_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """See `Weight.norm_linear`."""
        if not self._takes(stream, norm, bias):
            return super().norm_linear(stream, norm, bias)
        call, width = self.norm_linear_call, self.matrix.num_outputs
        return norm_call(call, self.matrix, width, stream, norm, bias=bias)

    def norm_gated_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """See `Weight.norm_gated_linear`."""
        if not self._takes(stream, norm, bias) or self.matrix.num_outputs % 2:
            return super().norm_gated_linear(stream, norm, bias)
        width = self.matrix.num_outputs // 2
        return norm_call(self.norm_gated_linear_call, self.matrix, width, stream, norm, bias=bias)

    def adapted(self, lora: LoraWeights, plan: LoraPlan) -> CppAdapted:
        """See `Weight.adapted`."""
        return CppAdapted(self, lora, plan)

    def _takes(self, stream: Stream, norm: Norm, bias: torch.Tensor | None) -> bool:
        has_dtype = stream.hidden.dtype == self.values.dtype
        return has_dtype and takes(self.matrix, stream, norm, bias)


def takes(
    matrix: Matrix | QuantizedMatrix, stream: Stream, norm: Norm, bias: torch.Tensor | None
) -> bool:
    """Whether `norm_call` can read a stream, a norm and a bias for this weight."""
    hidden, pending, peers = stream
    is_plain = peers is None and has_form(pending, hidden.shape, hidden.dtype)
    has_norm = has_form(norm.weight, (matrix.num_columns,), hidden.dtype)
    return is_plain and has_norm and fits(hidden, bias, matrix.num_outputs, matrix.num_columns)


def norm_call(
    call: Callable[..., None],
    matrix: ctypes.Structure,
    width: int,
    stream: Stream,
    norm: Norm,
    *,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, Stream]:
    """Run a kernel that norms the stream [T, K] and returns [T, width]."""
    x, at_residual = stream.hidden.contiguous(), None
    total = x
    if stream.pending is not None:
        x, residual = stream.pending.contiguous(), x
        total, at_residual = torch.empty_like(x), residual.data_ptr()
    out = x.new_empty(x.shape[0], width)
    bias, norm_weight = None if bias is None else bias.contiguous(), norm.weight.contiguous()
    call(
        *(ctypes.addressof(matrix), None if bias is None else bias.data_ptr()),
        *(x.data_ptr(), at_residual, norm_weight.data_ptr(), norm.eps),
        *(total.data_ptr(), out.data_ptr(), x.shape[0], torch.get_num_threads()),
    )
    return out, Stream(total)


def dense_weight(values: torch.Tensor) -> Dense:
    """Make a weight; see `nv_kernels.linear.weight.dense_weight`."""
    packed = pack_weight(values)
    return CppDense.of(packed) or Dense(packed)


def batch_invariant_weight(values: torch.Tensor) -> Dense:
    """Make a weight; see `nv_kernels.linear.weight.batch_invariant_weight`."""
    packed = pack_weight(values)
    return CppDense.of(packed) or BatchInvariantDense(packed)
