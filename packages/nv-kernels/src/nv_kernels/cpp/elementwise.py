"""Norms and the gate in C++, of contiguous fp32 or bf16; the definitions for everything else.

Each token is computed alone, so that its bits do not depend on the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.cpp.calls import has_form, kernel
from nv_kernels.elementwise import gate, norm

if TYPE_CHECKING:
    from collections.abc import Callable


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise; see `nv_kernels.reference.rms_norm`."""
    if kernel("add_rms_norm", x.dtype) is None or weight.shape != x.shape[-1:] or not x.numel():
        return norm.rms_norm.definition(x, weight, eps)
    return add_rms_norm(x.reshape(-1, x.shape[-1]), None, weight, eps)[0].view(x.shape)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add and normalise; see `nv_kernels.reference.add_rms_norm`."""
    call = kernel("add_rms_norm", x.dtype)
    fits = x.dim() == 2 and has_form(weight, x.shape[1:], x.dtype)
    if call is None or not fits or not has_form(residual, x.shape, x.dtype):
        return norm.add_rms_norm.definition(x, residual, weight, eps, dtype)
    x = x.contiguous()
    normed, total, at_residual = torch.empty_like(x), x, None
    if residual is not None:
        residual, total = residual.contiguous(), torch.empty_like(x)
        at_residual = residual.data_ptr()
    outputs = (normed.data_ptr(), total.data_ptr())
    weight, sizes = weight.contiguous(), (*x.shape, torch.get_num_threads())
    call(x.data_ptr(), at_residual, weight.data_ptr(), eps, *outputs, *sizes)
    return normed, total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate; see `nv_kernels.reference.silu_and_mul`."""
    call = kernel("silu_and_mul", x.dtype)
    if call is None or x.dim() != 2 or x.shape[1] % 2:
        return gate.silu_and_mul.definition(x)
    return _gated(call, x)


def batch_invariant_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate; `silu_and_mul` already computes each row alone."""
    if kernel("silu_and_mul", x.dtype) is None or x.dim() != 2:
        return gate.batch_invariant_silu_and_mul.definition(x)
    return silu_and_mul(x)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate; see `nv_kernels.reference.gelu_tanh_and_mul`."""
    call = kernel("gelu_tanh_and_mul", x.dtype)
    if call is None or x.dim() != 2 or x.shape[1] % 2:
        return gate.gelu_tanh_and_mul.definition(x)
    return _gated(call, x)


def _gated(call: Callable[..., None], x: torch.Tensor) -> torch.Tensor:
    """Run a kernel of a gate: [T, 2F] -> [T, F]."""
    x = x.contiguous()
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    call(x.data_ptr(), out.data_ptr(), *out.shape, torch.get_num_threads())
    return out
