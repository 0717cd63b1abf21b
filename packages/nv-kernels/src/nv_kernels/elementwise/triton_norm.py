"""RMS normalisation, alone and with the residual addition and the split-K sum before it.

Both kernels have the definition's rounding points.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nv_kernels.elementwise.norm import sum_dtype
from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2

gdc_launch = tl.extra.cuda.gdc_launch_dependents
gdc_wait = tl.extra.cuda.gdc_wait


@triton.jit
def _normalised(x, scale, eps, E: tl.constexpr, WEIGHT: tl.constexpr, DTYPE: tl.constexpr):
    """Norm [ROWS, BLOCK] fp32: rounded to WEIGHT before the weight multiplies, then to DTYPE."""
    inverse = tl.rsqrt(tl.sum(x * x, 1) / E + eps)
    rounded = (x * inverse[:, None]).to(WEIGHT).to(tl.float32)
    return (rounded * scale[None, :]).to(DTYPE)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x,
    weight,
    out,
    num_rows,
    eps,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program normalises ROWS rows."""
    if PDL:
        gdc_launch()
    cols = tl.arange(0, BLOCK)
    scale = tl.load(weight + cols, mask=cols < E, other=0.0).to(tl.float32)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (rows < num_rows)[:, None] & (cols < E)[None, :]
    at = rows[:, None].to(tl.int64) * E + cols[None, :]
    if PDL:
        gdc_wait()
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    normed = _normalised(values, scale, eps, E, weight.dtype.element_ty, out.dtype.element_ty)
    tl.store(out + at, normed, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    num_rows,
    eps,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PARTIALS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum PARTIALS slices of x in order, add the residual, store the total, normalise it."""
    if PDL:
        gdc_launch()
    dtype: tl.constexpr = out.dtype.element_ty
    cols = tl.arange(0, BLOCK)
    scale = tl.load(weight + cols, mask=cols < E, other=0.0).to(tl.float32)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (rows < num_rows)[:, None] & (cols < E)[None, :]
    at = rows[:, None].to(tl.int64) * E + cols[None, :]
    if PDL:
        gdc_wait()
    if HAS_RESIDUAL:
        stream = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTIALS):
        start = tl.cast(num_rows, tl.int64) * (part * E)
        values += tl.load(x + start + at, mask=mask, other=0.0).to(tl.float32)
    values = values.to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        values = (values + stream).to(dtype).to(tl.float32)
    tl.store(total + at, values.to(dtype), mask=mask)
    normed = _normalised(values, scale, eps, E, weight.dtype.element_ty, dtype)
    tl.store(out + at, normed, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each vector by its root mean square and scale it.

    Args:
        x: [..., E] bf16, fp16 or fp32.
        weight: [E], in x's dtype or fp32.
        eps: added to the mean square.

    Returns:
        [..., E] in x's dtype.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    num_rows = x.numel() // x.shape[-1]
    if num_rows:
        block, rows, warps = _tile(x.shape[-1])
        rms_norm_kernel[(cdiv(num_rows, rows),)](
            x, weight, out, num_rows, eps, x.shape[-1], block, rows,
            num_warps=warps, **dependent_launch(x),
        )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a layer's output to the residual stream and normalise the sum.

    Args:
        x: [T, E], or [P, T, E] split-K partials of any float dtype, summed in fp32 in order of P.
        residual: [T, E], or None if x starts the stream. It is not changed.
        weight: [E], in the sum's dtype or fp32.
        eps: added to the mean square.
        dtype: of the sum where x is partials without a residual; None: weight's.

    Returns:
        The normalised sum [T, E] and the sum itself [T, E].
    """
    if residual is None and x.dim() == 2:
        return rms_norm(x, weight, eps), x
    x = x.contiguous()
    num_rows, width = x.shape[-2:]
    dtype = sum_dtype(residual, weight, dtype)
    out = torch.empty(num_rows, width, dtype=dtype, device=x.device)
    total = torch.empty_like(out)
    if num_rows:
        block, rows, warps = _tile(width)
        add_rms_norm_kernel[(cdiv(num_rows, rows),)](
            x, x if residual is None else residual.contiguous(), weight, out, total,
            num_rows, eps, width, block, rows, x.shape[0] if x.dim() == 3 else 1,
            residual is not None, num_warps=warps, **dependent_launch(x),
        )  # fmt: skip
    return out, total


def _tile(width: int) -> tuple[int, int, int]:
    """Return columns, rows and warps of a program: 4 elements per thread, 16 warps at most."""
    block = next_power_of_2(width)
    rows = max(1, 512 // block)
    return block, rows, min(16, max(1, block * rows // 128))
