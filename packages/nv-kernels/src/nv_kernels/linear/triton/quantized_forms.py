"""The Gluon kernel of a form: whether it is there and takes some tensors, and its launch.

Gluon is experimental, so its modules are imported only on a Hopper card that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from nv_kernels.launch.card import is_hopper
from nv_kernels.linear.quantized.tuned import Groups, Ring, Warps
from nv_kernels.linear.stream import Stream
from nv_kernels.linear.triton.product import gluon_module

if TYPE_CHECKING:
    from nv_kernels.linear.quantized.tuned import GluonForm
    from nv_kernels.linear.stream import Norm
    from nv_kernels.linear.triton.quantized_layout import LaidOut

GROUPED = {Ring: "slab", Warps: "few", Groups: "many"}
CODES = {Ring: "slab", Groups: "many"}


def grouped_fits(form: GluonForm, x: torch.Tensor, weight: LaidOut, *, gated: bool) -> bool:
    """Whether a form's kernel multiplies tokens by these codes of 4 bits."""
    name = GROUPED[type(form)]
    module = gluon_module(f"quantized_{name}") if is_hopper(x) else None
    return module is not None and getattr(module, f"grouped_{name}_fits")(
        form, x, weight, gated=gated
    )


def grouped_product(
    form: GluonForm,
    x: torch.Tensor,
    weight: LaidOut,
    *,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply tokens by codes of 4 bits; see the form's kernel."""
    name = GROUPED[type(form)]
    module = gluon_module(f"quantized_{name}")
    assert module is not None
    multiply = getattr(module, f"grouped_{name}")
    return cast("torch.Tensor", multiply(form, x, weight, gated=gated, dtype=dtype))


def added_product(
    form: Warps, x: torch.Tensor, weight: LaidOut, residual: torch.Tensor
) -> torch.Tensor:
    """Multiply one token and add the residual [1, N]."""
    module = gluon_module("quantized_few")
    assert module is not None
    return cast("torch.Tensor", module.grouped_few(form, x, weight, residual=residual))


def normed_product(
    form: Warps, stream: Stream, norm: Norm, weight: LaidOut, *, gated: bool
) -> tuple[torch.Tensor, Stream]:
    """Add pending fp32 partials to the stream of one token, norm and multiply."""
    module = gluon_module("quantized_few")
    assert module is not None
    prologue = (norm.weight, norm.eps)
    hidden, pending, _ = stream
    if pending is None:
        return module.grouped_few(form, hidden, weight, gated=gated, norm=prologue), stream
    total = torch.empty_like(hidden)
    out = module.grouped_few(
        form, pending, weight, gated=gated, norm=prologue, residual=hidden, total=total
    )
    return out, Stream(total)


def codes_fit(form: GluonForm, x: torch.Tensor, weight: torch.Tensor, *, gated: bool) -> bool:
    """Whether a form's kernel multiplies these codes of 8 bits."""
    name = CODES[type(form)]
    module = gluon_module(f"quantized_codes_{name}") if is_hopper(x) else None
    return module is not None and getattr(module, f"codes_{name}_fits")(
        form, x, weight, gated=gated
    )


def gluon_codes_product(
    form: GluonForm,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    dtype: torch.dtype,
    gated: bool = False,
) -> torch.Tensor:
    """Multiply codes of 8 bits; see the form's kernel."""
    name = CODES[type(form)]
    module = gluon_module(f"quantized_codes_{name}")
    assert module is not None
    multiply = getattr(module, f"codes_{name}")
    out = multiply(form, x, x_scale, weight, w_scale, dtype=dtype, gated=gated)
    return cast("torch.Tensor", out)
