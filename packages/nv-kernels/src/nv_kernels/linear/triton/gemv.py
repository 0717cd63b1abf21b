"""One or two tokens times a weight, on the CUDA cores, at the speed of reading the weight.

A program holds whole rows of the weight in registers, loaded before the wait for the previous
kernel, so that memory is read while that kernel still runs. The RMS norm is in the prologue (a
scale of the finished row); bias, residual or silu(gate) * up are in the epilogue. `tuned` decides
when to use it.
"""

# mypy: disable-error-code="assignment, unreachable, var-annotated"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv

if TYPE_CHECKING:
    from nv_kernels.linear.tuned import Gemv

gdc_launch = tl.extra.cuda.gdc_launch_dependents
gdc_wait = tl.extra.cuda.gdc_wait


@triton.jit
def _columns(ptr, at, chunk: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load one chunk of a vector [K] in fp32, 0 past its end."""
    if (chunk + 1) * BLOCK_K <= K:
        return tl.load(ptr + chunk * BLOCK_K + at).to(tl.float32)
    else:
        inside = chunk * BLOCK_K + at < K
        return tl.load(ptr + chunk * BLOCK_K + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _weights(
    ptr, rows, at, chunk: tl.constexpr, N, K: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Load one chunk of some rows of a weight [N, K], 0 outside."""
    place = ptr + rows[:, None].to(tl.int64) * K + chunk * BLOCK_K + at[None, :]
    if EVEN and (chunk + 1) * BLOCK_K <= K:
        return tl.load(place, eviction_policy="evict_first")
    else:
        inside = (rows < N)[:, None] & (chunk * BLOCK_K + at < K)[None, :]
        return tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def gemv_kernel(
    x, weight, out, norm_weight, residual, bias, eps, N,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute ROWS outputs of TOKENS tokens; N outputs in all, gate rows then up rows if GATED."""
    if PDL:
        gdc_launch()
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK_K)
    weights = ()
    ups = ()
    scales = ()
    for chunk in tl.static_range(CHUNKS):
        weights = weights + (_weights(weight, rows, at, chunk, N, K, BLOCK_K, EVEN),)
        if GATED:
            up = weight + N.to(tl.int64) * K
            ups = ups + (_weights(up, rows, at, chunk, N, K, BLOCK_K, EVEN),)
        if NORM:
            scales = scales + (_columns(norm_weight, at, chunk, K, BLOCK_K),)
    if BIAS:
        offset = tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    for token in tl.static_range(TOKENS):
        sums = tl.zeros((ROWS, BLOCK_K), tl.float32)
        up_sums = tl.zeros((ROWS, BLOCK_K), tl.float32)
        squares = tl.zeros((BLOCK_K,), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            values = _columns(x + token * K, at, chunk, K, BLOCK_K)
            if NORM:
                squares += values * values
                values = values * scales[chunk]
            sums += weights[chunk].to(tl.float32) * values[None, :]
            if GATED:
                up_sums += ups[chunk].to(tl.float32) * values[None, :]
        y = tl.sum(sums, 1)
        if NORM:
            inverse = tl.rsqrt(tl.sum(squares, 0) / K + eps)
            y = y * inverse
        if GATED:
            z = tl.sum(up_sums, 1)
            if NORM:
                z = z * inverse
            y = y * tl.sigmoid(y) * z
        if BIAS:
            y += offset
        place = token * N + rows
        if RESIDUAL:
            y = y.to(out.dtype.element_ty).to(tl.float32)
            y += tl.load(residual + place, mask=rows < N, other=0.0).to(tl.float32)
        tl.store(out + place, y.to(out.dtype.element_ty), mask=rows < N)


def gemv(
    form: Gemv,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply a few tokens by a weight.

    Args:
        form: the settings.
        x: [T, K], T small: each token is another pass over the registers.
        weight: [N, K], or [2F, K] (gate rows, then up rows) where gated.
        norm: (weight [K], eps) of an RMS norm of x, or None.
        gated: return silu(gate) * up, [T, F].
        residual: added to the result, [T, N].
        bias: added to the result, [N]; not where gated.
        dtype: of the result, x's by default.

    Returns:
        [T, N] or [T, F].
    """
    tokens, columns = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(tokens, outputs, dtype=dtype or x.dtype, device=x.device)
    norm_weight, eps = norm or (weight, 0.0)
    gemv_kernel[(cdiv(outputs, form.rows),)](
        x, weight, out, norm_weight, x if residual is None else residual,
        weight if bias is None else bias, eps, outputs,
        columns, form.block_k, form.rows, tokens, norm is not None, gated,
        residual is not None, bias is not None, outputs % form.rows == 0,
        num_warps=form.warps, **dependent_launch(x),
    )  # fmt: skip
    return out
