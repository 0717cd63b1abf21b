"""The signatures of the compiled kernels, by op and by the dtypes of their tensors."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from nv_kernels.cpp.library import library

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}

_POINTER, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_CACHE = (_POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE)  # k, v, three strides, block size
SIGNATURES = {
    "linear": (*[_POINTER] * 4, *[_SIZE] * 3, _INT),
    "linear_tiles": (*[_POINTER] * 4, *[_SIZE] * 3, _INT),
    "linear_quantized": (*[_POINTER] * 4, _SIZE, _INT),
    "norm_linear": (*[_POINTER] * 5, _FLOAT, *[_POINTER] * 2, _SIZE, _INT),
    "norm_gated_linear": (*[_POINTER] * 5, _FLOAT, *[_POINTER] * 2, _SIZE, _INT),
    "norm_linear_quantized": (*[_POINTER] * 5, _FLOAT, *[_POINTER] * 2, _SIZE, _INT),
    "norm_gated_linear_quantized": (*[_POINTER] * 5, _FLOAT, *[_POINTER] * 2, _SIZE, _INT),
    "route": (*[_POINTER] * 3, *[_SIZE] * 3, _INT, _INT),
    "experts": (
        *(*[_POINTER] * 4, *[_SIZE] * 4, *[_FLOAT] * 3, *[_POINTER] * 4, *[_SIZE] * 2, _INT),
    ),
    "experts_quantized": (
        *(*[_POINTER] * 5, *[_SIZE] * 3, *[_FLOAT] * 3, *[_POINTER] * 4, *[_SIZE] * 2, _INT),
    ),
    "add_rms_norm": (*[_POINTER] * 3, _FLOAT, *[_POINTER] * 2, *[_SIZE] * 2, _INT),
    "silu_and_mul": (*[_POINTER] * 2, *[_SIZE] * 2, _INT),
    "gelu_tanh_and_mul": (*[_POINTER] * 2, *[_SIZE] * 2, _INT),
    "apply_rope": (*[_POINTER] * 4, *[_SIZE] * 5, _INT),
    "greedy": (*[_POINTER] * 2, *[_SIZE] * 3, _INT),
    "qk_norm_rope_store": (
        *(_POINTER, _POINTER, _POINTER, _FLOAT, _POINTER, _POINTER, *_CACHE),
        *(_POINTER, _POINTER, *[_SIZE] * 7, _INT),
    ),
    "attention": (
        *(_POINTER, *_CACHE, _POINTER, _POINTER, _POINTER, *[_SIZE] * 5),
        *(_FLOAT, _FLOAT, _SIZE, _FLOAT, _POINTER, _POINTER, _SIZE, _INT),
    ),
}


REFUSE = {"apply_rope", "qk_norm_rope_store"}
"""Ops whose kernels return False, and do nothing, for a value that they would read or write at."""


def has_form(x: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether x has this shape and dtype, or is left out (None).

    A kernel gets addresses alone: it would read past the end of a smaller tensor, and read other
    types as its own. What it cannot read goes to the definition, which computes or refuses it.
    """
    return x is None or (x.shape == shape and x.dtype == dtype)


@cache
def kernel(op: str, *dtypes: torch.dtype) -> Callable[..., Any] | None:
    """Find a kernel.

    Args:
        op: a name of SIGNATURES.
        *dtypes: dtypes of its tensors: of queries and cache for attention, of input and output for
            a product.

    Returns:
        A function of addresses and numbers, or None if there is no kernel for these types.
    """
    built = library()
    if built is None or not all(dtype in NAMES for dtype in dtypes):
        return None
    found = getattr(built, "_".join((op, *(NAMES[dtype] for dtype in dtypes))), None)
    if found is None:
        return None
    found.argtypes = SIGNATURES[op]
    found.restype = ctypes.c_bool if op in REFUSE else None
    call: Callable[..., Any] = found
    return call
