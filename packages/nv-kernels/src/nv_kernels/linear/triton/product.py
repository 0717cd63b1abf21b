"""Products by a weight: our kernels where they are faster, the library elsewhere.

Owns the choice at call time (card, dtype, alignment). `tuned` has the settings.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from torch.nn import functional

from nv_kernels.elementwise.triton_gate import silu_and_mul
from nv_kernels.launch.card import is_hopper
from nv_kernels.linear.lora.triton_expand import MOST_PARTS
from nv_kernels.linear.triton.dot import dot
from nv_kernels.linear.triton.gemv import gemv
from nv_kernels.linear.tuned import (
    DIRECT,
    DOT_TOKENS,
    Dot,
    Form,
    Gemv,
    Library,
    Many,
    Slab,
    choose,
    choose_adapted,
)

if TYPE_CHECKING:
    from types import ModuleType

    from nv_kernels.linear.lora.weight import LoraWeights


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply each row by the transposed weight.

    Args:
        x: [T, K].
        weight: [N, K], in x's dtype.
        bias: [N] or None.

    Returns:
        [T, N] in x's dtype, accumulated in fp32.
    """
    form = form_for(x, weight)
    if isinstance(form, Gemv):
        return gemv(form, x.contiguous(), weight, bias=bias)
    if bias is not None or isinstance(form, Library) or form.split_k > 1:
        return functional.linear(x, weight, bias)
    return product(form, x.contiguous(), weight)


def linear_partials(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply for a consumer that sums partials: add_rms_norm, qk_norm_rope_store.

    Args:
        x: [T, K].
        weight: [N, K], in x's dtype.

    Returns:
        [T, N] in x's dtype, or [P, T, N] partials whose sum over P is the product.
    """
    return product(form_for(x, weight), x.contiguous(), weight)


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply by gate and up, and gate: silu_and_mul(linear(x, weight)), rounded only once.

    Args:
        x: [T, K].
        weight: [2F, K], gate rows then up rows.

    Returns:
        [T, F] in x's dtype.
    """
    form, x = form_for(x, weight, gated=True), x.contiguous()
    if isinstance(form, Library) and is_hopper(x):
        module = gluon_module("hopper_gated")
        if module is not None and module.gated_hopper_fits(x, weight):
            return cast("torch.Tensor", module.gated_hopper(x, weight))
    return product(form, x, weight, gated=True)


def form_for(x: torch.Tensor, weight: torch.Tensor, *, gated: bool = False) -> Form:
    """Choose a form that runs here: tuned forms on Hopper, GEMV and the library elsewhere."""
    tokens, columns = x.shape
    if tokens == 0 or tokens > DOT_TOKENS or x.element_size() != 2 or not weight.is_contiguous():
        return Library()
    form = choose(tokens, weight.shape[0], columns, gated)
    if isinstance(form, (Gemv, Library)):
        return form
    if not is_hopper(x) or not _fits(form, x, weight):
        return Library()
    return form


def adapted_form(
    x: torch.Tensor, weight: torch.Tensor, lora: LoraWeights, *, gated: bool = False
) -> Gemv | Dot | None:
    """Choose a form that adds the adapters' product itself; None: no form fits."""
    (tokens, columns), parts = x.shape, lora.part_rows
    base = form_for(x, weight, gated=gated)
    if len(parts) > MOST_PARTS:
        return None
    if isinstance(base, Gemv):
        return base
    if tokens == 0 or not is_hopper(x) or x.element_size() != 2 or not weight.is_contiguous():
        return None
    form = choose_adapted(tokens, weight.shape[0], columns, gated)
    if (
        form is None
        or lora.b.dtype != x.dtype
        or any(rows % (32 if gated else form.block_n) for rows in parts)
    ):
        return None
    return form


def _fits(form: Slab | Dot | Many, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the form's kernel reads both: the bulk copy needs 16-byte aligned addresses."""
    if isinstance(form, Dot):
        return True
    aligned = x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return aligned and gluon_module("slab" if isinstance(form, Slab) else "many") is not None


def product(
    form: Form,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply by the form's kernel, into x's dtype or another; partials if it splits K."""
    if isinstance(form, Library):
        out = library_product(x, weight, dtype or x.dtype)
        return silu_and_mul(out) if gated else out
    if isinstance(form, Gemv):
        return gemv(form, x, weight, gated=gated, dtype=dtype)
    if isinstance(form, (Slab, Many)):
        name = "slab" if isinstance(form, Slab) else "many"
        multiply = getattr(gluon_module(name), name)
        result: torch.Tensor = multiply(form, x, weight, gated=gated, dtype=dtype)
        return result
    return dot(form, x, weight, gated=gated, dtype=dtype)


def library_product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply by the library's kernel; 16 bits into their own dtype or fp32."""
    if dtype == x.dtype:
        return functional.linear(x, weight)
    return torch.mm(x, weight.t(), out_dtype=dtype)


@cache
def gluon_module(name: str) -> ModuleType | None:
    """Import a module with a Gluon kernel; None if this Triton has another version of Gluon."""
    try:
        return importlib.import_module(f"nv_kernels.linear.triton.{name}")
    except ImportError:
        return None


def one_launch(
    form: Gemv,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply one or two tokens, with what is before and after: see `gemv` and `direct`."""
    shape = (*weight.shape, gated)
    better = DIRECT.get(shape) if bias is None and x.shape[0] == 1 else None
    if better is not None and is_hopper(x):
        module = gluon_module("direct")
        if module is not None and module.direct_fits(better, x, weight, norm=norm, gated=gated):
            result: torch.Tensor = module.direct(
                better, x, weight, norm=norm, gated=gated, residual=residual
            )
            return result
    return gemv(form, x, weight, norm=norm, gated=gated, residual=residual, bias=bias)
