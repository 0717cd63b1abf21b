"""One or two tokens times a weight, on the CUDA cores, at the speed of reading the weight.

A program holds whole rows of the weight in registers, loaded before the wait for the previous
kernel, so that memory is read while that kernel still runs. The RMS norm is in the prologue (a
scale of the finished row); bias, an adapter's product, residual or silu(gate) * up are in the
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
def _delta(
    hidden, b, adapters, token, rows, part, N, b_stride,
    RANK: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The product of a token's adapter in some rows: hidden [SPLITS, TOKENS, PARTS, RANK] by B."""
    adapter = tl.load(adapters + token).to(tl.int64)
    wanted = (rows < N)[:, None] & (adapter >= 0)
    ranks = tl.arange(0, RANK)
    at = (rows * 0 + part)[:, None] * RANK + ranks[None, :]
    values = tl.load(hidden + token * PARTS * RANK + at, mask=wanted, other=0.0)
    for split in tl.static_range(1, SPLITS):
        more = hidden + (split * TOKENS + token) * PARTS * RANK + at
        values += tl.load(more, mask=wanted, other=0.0)
    b_at = b + tl.maximum(adapter, 0) * b_stride + rows[:, None].to(tl.int64) * RANK
    factors = tl.load(b_at + ranks[None, :], mask=wanted, other=0.0)
    rounded = values.to(factors.dtype).to(tl.float32)
    return tl.sum(rounded * factors.to(tl.float32), 1)


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
        if BIAS:
            y += offset
        if RANK:
            part = 0 if GATED else (rows >= N0).to(tl.int32) + (rows >= N1).to(tl.int32)
            y += _delta(
                hidden, lora_b, adapters, token, rows, part, N, lora_stride,
                RANK, PARTS, SPLITS, TOKENS,
            )  # fmt: skip
        if GATED:
            z = tl.sum(up_sums, 1)
            if NORM:
                z = z * inverse
            if RANK:
                up_b = lora_b + N.to(tl.int64) * RANK
                z += _delta(
                    hidden, up_b, adapters, token, rows, 1, N, lora_stride,
                    RANK, PARTS, SPLITS, TOKENS,
                )  # fmt: skip
            y = y * tl.sigmoid(y) * z
        place = token * N + rows
        if RESIDUAL:
            y = y.to(out.dtype.element_ty).to(tl.float32)
            y += tl.load(residual + place, mask=rows < N, other=0.0).to(tl.float32)
        tl.store(out + place, y.to(out.dtype.element_ty), mask=rows < N)


class GemvAdapters(NamedTuple):
    """The adapters of the tokens of one product.

    Attributes:
        hidden: [Z, T, parts * R] fp32 of `shrink_few`.
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
        total, first = sum(self.part_rows), self.part_rows[0]
        second = first + self.part_rows[1] if len(self.part_rows) > 1 else total
        return self.b.shape[2], len(self.part_rows), len(self.hidden), first, second


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
        num_warps=form.warps, **dependent_launch(x),
    )  # fmt: skip
    return out
