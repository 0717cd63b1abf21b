"""A quantized weight on a CPU: an op of a layer is one call, which reads the record's own tensors.

GGUF's blocks are used where they lie in the mapped file. A row's result does not depend on the
other rows.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING

import torch

from nv_kernels.cpp.adapted import CppAdapted
from nv_kernels.cpp.calls import kernel
from nv_kernels.cpp.linear import fits
from nv_kernels.cpp.weight import norm_call, takes
from nv_kernels.linear.quantized.blocks import Blocks
from nv_kernels.linear.quantized.fp8 import Fp8
from nv_kernels.linear.quantized.grouped import Grouped
from nv_kernels.linear.quantized.int8 import Int8
from nv_kernels.linear.quantized.tokens import BLOCK
from nv_kernels.linear.quantized.weight import BatchInvariantQuantized
from nv_kernels.linear.weight import Weight

if TYPE_CHECKING:
    from nv_kernels.linear.lora.plan import LoraPlan
    from nv_kernels.linear.lora.weight import LoraWeights
    from nv_kernels.linear.quantized.record import Quantized
    from nv_kernels.linear.stream import Norm, Stream

# The numbers that codes.h and quantized.h give to kinds of rows, to types, and to inputs.
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "4", "8", "fp8", "int8")
TYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.uint8)
INPUTS = (None, "int8", "token", "block")
SCALED_INPUTS = 4


class QuantizedRows(ctypes.Structure):
    """The struct of some rows that `codes.h` declares."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("stride", "row_bytes", "num_rows", "kind")),
        ("scale", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("scale_type", "offset_type", "scale_rows", "group_size")),
    )


class QuantizedMatrix(ctypes.Structure):
    """The struct of a weight that `quantized.h` declares."""

    _fields_ = (
        ("parts", ctypes.POINTER(QuantizedRows)),
        ("index", ctypes.c_void_p),
        ("row_scale", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("num_outputs", "num_columns", "inputs", "invariant")),
        ("input_scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class CppQuantized(Weight):
    """A record, multiplied by the compiled kernels in fp32 and bf16, by its definition elsewhere.

    Attributes:
        record: codes and scales; their tensors must not move.
        matrix: their addresses.
        plain: the weight of other dtypes.
    """

    record: Quantized
    matrix: QuantizedMatrix
    plain: Weight

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.linear`."""
        has_kernel = kernel("linear_quantized", x.dtype, x.dtype) is not None
        if not has_kernel or not fits(x, bias, *self.record.shape):
            return self.plain.linear(x, bias)
        return self._multiply(x, bias, x.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Weight.logits`."""
        has_kernel = kernel("linear_quantized", hidden.dtype, torch.float32) is not None
        if not has_kernel or not fits(hidden, None, *self.record.shape):
            return self.plain.logits(hidden)
        return self._multiply(hidden, None, torch.float32)

    def norm_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """See `Weight.norm_linear`."""
        call = kernel("norm_linear_quantized", stream.hidden.dtype)
        if call is None or not self._takes(stream, norm, bias):
            return super().norm_linear(stream, norm, bias)
        return norm_call(call, self.matrix, self.matrix.num_outputs, stream, norm, bias=bias)

    def norm_gated_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """See `Weight.norm_gated_linear`."""
        call = kernel("norm_gated_linear_quantized", stream.hidden.dtype)
        if call is None or not self._takes(stream, norm, bias) or self.matrix.num_outputs % 2:
            return super().norm_gated_linear(stream, norm, bias)
        width = self.matrix.num_outputs // 2
        return norm_call(call, self.matrix, width, stream, norm, bias=bias)

    def adapted(self, lora: LoraWeights, plan: LoraPlan) -> CppAdapted:
        """See `Weight.adapted`."""
        return CppAdapted(self, lora, plan)

    def _takes(self, stream: Stream, norm: Norm, bias: torch.Tensor | None) -> bool:
        return self._order is None and takes(self.matrix, stream, norm, bias)

    @property
    def _order(self) -> torch.Tensor | None:
        return self.record.order if isinstance(self.record, Grouped) else None

    def _multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        call = kernel("linear_quantized", x.dtype, dtype)
        assert call is not None
        bias = None if bias is None else bias.contiguous()
        x = x.contiguous() if self._order is None else x[:, self._order]
        out = x.new_empty(x.shape[0], self.matrix.num_outputs, dtype=dtype)  # [T, N]
        call(
            *(
                ctypes.addressof(self.matrix),
                x.data_ptr(),
                None if bias is None else bias.data_ptr(),
            ),
            *(out.data_ptr(), x.shape[0], torch.get_num_threads()),
        )
        return out


def quantized_weight(record: Quantized) -> Weight:
    """Make a weight; see `nv_kernels.linear.quantized.weight.quantized_weight`."""
    matrix = _matrix_of(record)
    return record if matrix is None else CppQuantized(record, matrix, record)


def batch_invariant_quantized_weight(record: Quantized) -> Weight:
    """Make a weight of which every row of x is multiplied in the same way."""
    invariant, matrix = BatchInvariantQuantized(record), _matrix_of(record)
    if matrix is None:
        return invariant
    matrix.invariant = True
    return CppQuantized(record, matrix, invariant)


def _matrix_of(record: Quantized) -> QuantizedMatrix | None:
    """Describe a record to the kernels; None if no kernel takes it."""
    if kernel("linear_quantized", torch.float32, torch.float32) is None:
        return None
    return matrix_of(record)


def _rows(codes: torch.Tensor, kind: str, **more: object) -> QuantizedRows:
    """Describe rows of codes [n, bytes]; a row's bytes are adjacent."""
    assert codes.stride(1) == 1
    num_rows, row_bytes = codes.shape
    sizes = {"stride": codes.stride(0), "row_bytes": row_bytes, "num_rows": num_rows}
    at_codes, number = codes.data_ptr(), KINDS.index(kind)
    return QuantizedRows(codes=at_codes, kind=number, scale_rows=1, **sizes, **more)


def _matrix(record: Quantized, *parts: QuantizedRows, **more: object) -> QuantizedMatrix:
    rows, columns = record.shape
    return QuantizedMatrix(
        (QuantizedRows * len(parts))(*parts), num_outputs=rows, num_columns=columns, **more
    )


@singledispatch
def matrix_of(record: Quantized) -> QuantizedMatrix | None:
    """Describe a record to the kernels, or return None for a kind that they do not multiply.

    The record must outlive the result.
    """
    return None


@matrix_of.register
def _(record: Blocks) -> QuantizedMatrix:
    parts = [_rows(part, kind) for part, kind in zip(record.parts, record.kinds, strict=True)]
    index = None if record.index is None else record.index.data_ptr()
    return _matrix(record, *parts, index=index)


@matrix_of.register
def _(record: Grouped) -> QuantizedMatrix:
    offset = record.offset
    assert record.scale.is_contiguous()
    assert offset is None or offset.is_contiguous()
    rows = _rows(
        record.codes,
        str(record.bits),
        scale=record.scale.data_ptr(),
        offset=None if offset is None else offset.data_ptr(),
        scale_type=TYPES.index(record.scale.dtype),
        offset_type=TYPES.index(None if offset is None else offset.dtype),
        group_size=record.group_size,
    )
    return _matrix(record, rows)


@matrix_of.register
def _(record: Fp8) -> QuantizedMatrix:
    at_scale = record.scale.data_ptr()
    assert record.scale.is_contiguous()
    group_size = BLOCK if record.has_blocks else record.shape[1]
    rows = _rows(record.codes, "fp8", group_size=group_size)
    rows.scale_rows = BLOCK if record.has_blocks else 1
    if isinstance(record.inputs, float):
        inputs = {"inputs": SCALED_INPUTS, "input_scale": record.inputs}
    else:
        inputs = {"inputs": INPUTS.index(record.inputs)}
    if record.inputs == "block" or record.has_blocks:
        rows.scale = at_scale
        return _matrix(record, rows, **inputs)
    return _matrix(record, rows, row_scale=at_scale, **inputs)


@matrix_of.register
def _(record: Int8) -> QuantizedMatrix:
    assert record.scale.is_contiguous()
    rows = _rows(record.codes, "int8", group_size=record.shape[1])
    return _matrix(record, rows, row_scale=record.scale.data_ptr(), inputs=INPUTS.index("int8"))
