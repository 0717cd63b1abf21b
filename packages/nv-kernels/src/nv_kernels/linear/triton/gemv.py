"""One or two tokens times a weight, on the CUDA cores, at the speed of reading the weight.

A program holds whole rows of the weight in registers, loaded before the wait for the previous
kernel, so that memory is read while that kernel still runs. The RMS norm is in the prologue (a
scale of the finished row); an adapter's product, bias, residual or silu(gate) * up are in the
epilogue. `tuned` decides when to use it.
"""

# mypy: disable-error-code="assignment, unreachable, var-annotated"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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
def _factors(b, adapters, token, rows, N, b_stride, RANK: tl.constexpr):
    """The B of a token's adapter in some rows: [ROWS, RANK]."""
    adapter = tl.maximum(tl.load(adapters + token), 0).to(tl.int64)
    at = rows[:, None].to(tl.int64) * RANK + tl.arange(0, RANK)[None, :]
    return tl.load(b + adapter * b_stride + at, mask=(rows < N)[:, None], other=0.0)


@triton.jit
def _delta(
    factors, hidden, token, part,
    PARTS: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """A token's hidden values by the B of its adapter: [ROWS]."""
    RANK: tl.constexpr = factors.shape[1]
    at = hidden + (token * PARTS + part)[:, None] * RANK + tl.arange(0, RANK)[None, :]
    values = tl.load(at)
    for split in tl.static_range(1, SPLITS):
        values += tl.load(at + split * TOKENS * PARTS * RANK)
    return tl.sum(factors.to(tl.float32) * values, 1)


@triton.jit
def gemv_kernel(
    x, weight, out, norm_weight, residual, bias, hidden, lora_b, adapters, eps, N, lora_stride,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, PDL: tl.constexpr,
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
    factors = ()
    up_factors = ()
    for chunk in tl.static_range(CHUNKS):
        weights = weights + (_weights(weight, rows, at, chunk, N, K, BLOCK_K, EVEN),)
        if GATED:
            up = weight + N.to(tl.int64) * K
            ups = ups + (_weights(up, rows, at, chunk, N, K, BLOCK_K, EVEN),)
        if NORM:
            scales = scales + (_columns(norm_weight, at, chunk, K, BLOCK_K),)
    if RANK:
        part = rows * 0
        if not GATED and PARTS > 1:
            part = (rows >= N0).to(tl.int32) + (rows >= N1).to(tl.int32)
            part = tl.minimum(part, PARTS - 1)
        for token in tl.static_range(TOKENS):
            factors = factors + (_factors(lora_b, adapters, token, rows, N, lora_stride, RANK),)
            if GATED:
                up_b = lora_b + N.to(tl.int64) * RANK
                up = _factors(up_b, adapters, token, rows, N, lora_stride, RANK)
                up_factors = up_factors + (up,)
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
        if RANK:  # before the norm's scale, which the hidden values lack too
            y += _delta(factors[token], hidden, token, part, PARTS, SPLITS, TOKENS)
        if NORM:
            inverse = tl.rsqrt(tl.sum(squares, 0) / K + eps)
            y = y * inverse
        if BIAS:
            y += offset
        if GATED:
            z = tl.sum(up_sums, 1)
            if RANK:
                z += _delta(up_factors[token], hidden, token, part + 1, PARTS, SPLITS, TOKENS)
            if NORM:
                z = z * inverse
            y = y * tl.sigmoid(y) * z
        place = token * N + rows
        if RESIDUAL:
            y = y.to(out.dtype.element_ty).to(tl.float32)
            y += tl.load(residual + place, mask=rows < N, other=0.0).to(tl.float32)
        tl.store(out + place, y.to(out.dtype.element_ty), mask=rows < N)


class GemvAdapters(NamedTuple):
    """The adapters of the tokens of one product.

    Attributes:
        hidden: [Z, T, parts * R] fp32 of `shrink_few`; zeros for tokens without an adapter. Where
            x has a norm: of x times the norm's weight, without its scale.
        b: [S, N, R].
        of_tokens: [T] int32; NO_ADAPTER: none.
        part_rows: rows of each part, at most three.
    """

    hidden: torch.Tensor
    b: torch.Tensor
    of_tokens: torch.Tensor
    part_rows: tuple[int, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Those that the kernel reads."""
        return self.hidden, self.b, self.of_tokens

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """R, parts, Z, and the rows at which the second and the third part begin."""
        parts = self.part_rows
        return self.b.shape[2], len(parts), len(self.hidden), parts[0], sum(parts[:2])


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
    adapters: GemvAdapters | None = None,
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
        adapters: whose product is added, before the gate or the residual; None: none.

    Returns:
        [T, N] or [T, F].
    """
    tokens, columns = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(tokens, outputs, dtype=dtype or x.dtype, device=x.device)
    norm_weight, eps = norm or (weight, 0.0)
    hidden, b, of_tokens = adapters.tensors if adapters else (x, weight, x)
    rank, parts, splits, first, second = adapters.sizes if adapters else (0, 0, 0, 0, 0)
    gemv_kernel[(cdiv(outputs, form.rows),)](
        x, weight, out, norm_weight, x if residual is None else residual,
        weight if bias is None else bias, hidden, b, of_tokens, eps, outputs, b.stride(0),
        columns, form.block_k, form.rows, tokens, norm is not None, gated,
        residual is not None, bias is not None, outputs % form.rows == 0,
        rank, parts, splits, first, second,
        num_warps=form.warps, maxnreg=form.registers if adapters else None, **dependent_launch(x),
    )  # fmt: skip
    return out
