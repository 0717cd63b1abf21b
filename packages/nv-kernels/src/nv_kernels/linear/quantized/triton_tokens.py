"""Tokens quantized on a card, alone or by the launch that norms them.

Owns the kernel of the ops `quantize_tokens_fp8` and `quantize_tokens_int8`. With a norm it computes
what `add_rms_norm` computes, rounds as that rounds, and writes codes instead of floats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nv_kernels.elementwise.norm import sum_dtype
from nv_kernels.launch.card import converts_fp8
from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.launch.triton_previous import INTERPRETED
from nv_kernels.linear.quantized import tokens
from nv_kernels.linear.quantized.tokens import BLOCK

if TYPE_CHECKING:
    from nv_kernels.linear.stream import Norm

gdc_launch = tl.extra.cuda.gdc_launch_dependents
gdc_wait = tl.extra.cuda.gdc_wait
NARROW = 8192  # columns; more of them take 32 warps
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, ties to even


@triton.jit
def scale_of(sizes, LARGEST: tl.constexpr):
    """Return the scale of columns whose largest |x| is given; LARGEST is that of a code."""
    scale = tl.div_rn(sizes, LARGEST)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def quotient(values, scale):
    """Return values / scale, correctly rounded, in a few instructions (Markstein 1990)."""
    if INTERPRETED:  # it has no fused multiply-add
        return tl.div_rn(values, scale)
    else:
        lift = tl.where(scale < 1e-30, 1.2676506002282294e30, 1.0)  # 2^100: 1 / scale is finite
        values *= lift
        scale *= lift
        inverse = tl.div_rn(1.0, scale)
        about = values * inverse
        better = tl.fma(tl.fma(-about, scale, values), inverse, about)
        return tl.where(values == 0.0, values, better)  # or -0 would become 0


@triton.jit
def codes_of(values, LARGEST: tl.constexpr, IS_INT: tl.constexpr, CODE: tl.constexpr):
    """Round quotients to codes of a type, ties to even."""
    if IS_INT:
        return tl.clamp((values + ROUND) - ROUND, -128.0, 127.0).to(tl.int8)
    else:
        return tl.clamp(values, -448.0, 448.0).to(CODE)


@triton.jit
def tokens_kernel(
    x, residual, weight, codes, scales, total, fixed, num_rows, eps,
    E: tl.constexpr, BLOCK_E: tl.constexpr, PARTIALS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    NORM: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantize one row. NORM: first sum PARTIALS slices of x, add the residual, store, norm.

    INPUTS: "token", "block" (of 128 columns) or "fixed", the scale itself.
    """
    if PDL:
        gdc_launch()
    IS_INT: tl.constexpr = codes.dtype.element_ty == tl.int8
    LARGEST: tl.constexpr = 127.5 if IS_INT else 448.0
    dtype: tl.constexpr = total.dtype.element_ty
    columns = tl.arange(0, BLOCK_E)
    mask = columns < E
    if NORM:
        factor = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    row = tl.program_id(0)
    at = row.to(tl.int64) * E + columns
    if PDL:
        gdc_wait()
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        for part in tl.static_range(1, PARTIALS):
            start = tl.cast(num_rows, tl.int64) * (part * E)
            values += tl.load(x + start + at, mask=mask, other=0.0).to(tl.float32)
        values = values.to(dtype).to(tl.float32)
        if HAS_RESIDUAL:
            values += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
            values = values.to(dtype).to(tl.float32)
        if HAS_RESIDUAL or PARTIALS > 1:
            tl.store(total + at, values.to(dtype), mask=mask)
        inverse = tl.rsqrt(tl.sum(values * values, 0) / E + eps)
        rounded = (values * inverse).to(weight.dtype.element_ty).to(tl.float32)
        values = (rounded * factor).to(dtype).to(tl.float32)
    if INPUTS == "block":
        groups: tl.constexpr = (E + 127) // 128
        block = tl.arange(0, BLOCK_E // 128)
        pieces = tl.reshape(values, (BLOCK_E // 128, 128))
        scale = scale_of(tl.max(tl.abs(pieces), 1), LARGEST)
        tl.store(scales + block * num_rows + row, scale, mask=block < groups)
        quotients = tl.reshape(quotient(pieces, scale[:, None]), (BLOCK_E,))
    else:
        scale = fixed if INPUTS == "fixed" else scale_of(tl.max(tl.abs(values), 0), LARGEST)
        tl.store(scales + row, scale)
        quotients = quotient(values, scale)
    found = codes_of(quotients, LARGEST, IS_INT, codes.dtype.element_ty)
    tl.store(codes + at, found, mask=mask)


def quantize_tokens_fp8(
    x: torch.Tensor, inputs: str | float = "token"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row to e4m3; see `nv_kernels.reference.quantize_tokens_fp8`."""
    if x.is_cuda and not converts_fp8(x):
        return tokens.quantize_tokens_fp8.definition(x, inputs)
    codes, scales, _ = _launch(x.contiguous(), torch.float8_e4m3fn, inputs)
    return codes, scales


def quantize_tokens_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row to 8-bit integers; see `nv_kernels.reference.quantize_tokens_int8`."""
    codes, scales, _ = _launch(x.contiguous(), torch.int8, "token")
    return codes, scales


def norm_tokens(
    hidden: torch.Tensor,
    pending: torch.Tensor | None,
    norm: Norm,
    code: torch.dtype,
    inputs: str | float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add the pending product to the stream, norm and quantize.

    Args:
        hidden: the residual [T, E].
        pending: None, [T, E] or partials [P, T, E].
        norm: weight and eps.
        code: float8_e4m3fn or int8.
        inputs: how to quantize, as `quantize_tokens_fp8` takes it.

    Returns:
        The codes [T, E], their scales [T, G] fp32, and the stream [T, E].
    """
    return _launch(hidden.contiguous(), code, inputs, pending, norm)


def _launch(
    hidden: torch.Tensor,
    code: torch.dtype,
    inputs: str | float,
    pending: torch.Tensor | None = None,
    norm: Norm | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, width = hidden.shape
    groups = cdiv(width, BLOCK) if inputs == "block" else 1
    codes = torch.empty(rows, width, dtype=code, device=hidden.device)
    # Tokens side by side, as the library's product by blocks needs them.
    scales = torch.empty(groups, rows, dtype=torch.float32, device=hidden.device).t()
    total = hidden
    if norm is not None and pending is not None:
        dtype = sum_dtype(hidden, norm.weight, None)
        total = torch.empty(rows, width, dtype=dtype, device=hidden.device)
    x = hidden if pending is None else pending.contiguous()
    if rows:
        block = max(BLOCK, next_power_of_2(width))
        mode, fixed = ("fixed", inputs) if isinstance(inputs, float) else (inputs, 0.0)
        tokens_kernel[(rows,)](
            x, hidden, hidden if norm is None else norm.weight, codes, scales, total, fixed, rows,
            0.0 if norm is None else norm.eps, width, block, x.shape[0] if x.dim() == 3 else 1,
            pending is not None, norm is not None, mode,
            num_warps=min(16 if block <= NARROW else 32, max(1, block // 256)),
            **dependent_launch(x),
        )  # fmt: skip
    return codes, scales, total
