"""A decoder layer without its attention, in two calls of the compiled kernels.

Owns which layers they take, and a layer's addresses as they read them: a call an op costs a step of
a small model more than the ops do.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nv_kernels.cpp.calls import kernel
from nv_kernels.cpp.linear import is_in_tiles
from nv_kernels.linear.layer import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from nv_kernels.linear.layer import LayerWeights, Reduce


class Matrix(ctypes.Structure):
    """A product's weight and bias, as `layer.h` declares it."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_columns", ctypes.c_int64),
        ("in_tiles", ctypes.c_int64),
    )


class Layer(ctypes.Structure):
    """A layer's weights, as `layer.h` declares it."""

    _fields_ = (
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("qkv", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True)
class CPUPieces:
    """The chain's two pieces for one layer, whose weights outlive it.

    Attributes:
        layer: its addresses.
        num_qkv: columns of the fused projection.
        dtype: of its weights.
        call_input: the kernel of the first piece.
        call_output: the kernel of the second.
    """

    layer: Layer
    num_qkv: int
    dtype: torch.dtype
    call_input: Callable[..., None]
    call_output: Callable[..., None]

    def attention_input(self, layer: LayerWeights, stream: Stream) -> tuple[torch.Tensor, Stream]:
        """As `nv_kernels.linear.chain.attention_input`."""
        del layer
        x, residual, at_residual = stream.hidden.contiguous(), None, None
        total = x
        if stream.pending is not None:
            x, residual = stream.pending.contiguous(), x
            total, at_residual = torch.empty_like(x), residual.data_ptr()
        qkv = x.new_empty(x.shape[0], self.num_qkv)  # [T, (Hq + 2 Hkv) D]
        outputs = (total.data_ptr(), qkv.data_ptr())
        sizes = (x.shape[0], torch.get_num_threads())
        self.call_input(ctypes.addressof(self.layer), x.data_ptr(), at_residual, *outputs, *sizes)
        return qkv, Stream(total)

    def attention_output(
        self,
        layer: LayerWeights,
        attended: torch.Tensor,
        stream: Stream,
        reduce: Reduce | None = None,
    ) -> Stream:
        """As `nv_kernels.linear.chain.attention_output`, without a reduction."""
        del layer
        assert reduce is None, "ranks add up between the products"
        attended, hidden = attended.contiguous(), stream.hidden.contiguous()
        after, pending = torch.empty_like(hidden), torch.empty_like(hidden)
        inputs = (attended.data_ptr(), hidden.data_ptr())
        sizes = (hidden.shape[0], torch.get_num_threads())
        self.call_output(
            ctypes.addressof(self.layer), *inputs, after.data_ptr(), pending.data_ptr(), *sizes
        )
        return Stream(after, pending)


def pieces(layer: LayerWeights, stream: Stream) -> CPUPieces | None:
    """Give a layer's pieces.

    Args:
        layer: whose addresses stay what they are at the first call.
        stream: what they are for.

    Returns:
        The pieces, or None if there is no kernel for the layer or the stream.
    """
    if "cpu" not in layer.prepared:
        layer.prepared["cpu"] = _prepare(layer)
    prepared: CPUPieces | None = layer.prepared["cpu"]
    if prepared is None or stream.hidden.dtype != prepared.dtype:
        return None
    return None if stream.pending is not None and stream.pending.dim() != 2 else prepared


def _prepare(layer: LayerWeights) -> CPUPieces | None:
    dtype = layer.attention_norm.dtype
    weights = (layer.qkv, layer.output, layer.gate_up, layer.down)
    call_input, call_output = kernel("attention_input", dtype), kernel("attention_output", dtype)
    # A bf16 weight that is not in tiles is multiplied faster by torch at many rows.
    if call_input is None or call_output is None or not all(_takes(w, dtype) for w in weights):
        return None
    addresses = Layer(
        layer.attention_norm.data_ptr(),
        layer.mlp_norm.data_ptr(),
        _matrix(layer.qkv, layer.qkv_bias),
        _matrix(layer.output, layer.output_bias),
        _matrix(layer.gate_up, layer.gate_up_bias),
        _matrix(layer.down, layer.down_bias),
        layer.eps,
    )
    return CPUPieces(addresses, addresses.qkv.num_outputs, dtype, call_input, call_output)


def _takes(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    if weight.is_mkldnn or weight.dtype != dtype or not weight.is_contiguous():
        return False
    return dtype == torch.float32 or is_in_tiles(weight)


def _matrix(weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
    rows, columns = weight.shape[:2]
    if is_in_tiles(weight):
        rows, columns = rows * 16, columns * 32
    at_bias = None if bias is None else bias.data_ptr()
    return Matrix(weight.data_ptr(), at_bias, rows, columns, is_in_tiles(weight))
