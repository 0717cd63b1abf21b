"""Tokens times the A of their adapters: in tiles of one adapter's tokens, or for one or two tokens.

K is split over programs, whose sums the product by B adds. The next kernel, which reads the base's
weight, may start at once; A is read before the wait for the previous kernel.
"""

# mypy: disable-error-code="assignment, unreachable, var-annotated"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.launch.triton_previous import prefetch_l2
from nv_kernels.linear.lora.plan import LOW

if TYPE_CHECKING:
    from nv_kernels.linear.lora.plan import LoraPlan

BLOCK_K = 128
MOST_ROWS = 64  # of A, per program
LINE = tl.constexpr(64)  # values of 16 bits in a line of the cache
MOST_SPLITS = 8
LEAST_SPAN = 1024  # columns of a split: the product by B reads the sums of all splits
INVARIANT_SPLITS = 4
MANY_SPAN = 2048  # the same in steps with tiles of HIGH tokens
FEW_SPAN = 4096  # columns of a program with one token

gdc_launch = tl.extra.cuda.gdc_launch_dependents
gdc_wait = tl.extra.cuda.gdc_wait


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    x, a, places, tile_adapters, out, num_tokens, a_stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N of the ROWS values of a tile, over SPAN columns of K."""
    if PDL:
        gdc_launch()
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    adapter = tl.load(tile_adapters + tile).to(tl.int64)
    if adapter < 0:
        if PDL:
            gdc_wait()
        return
    tokens = tl.load(places + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    is_real = tokens >= 0
    sources = tl.where(is_real, tokens, 0).to(tl.int64)
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = split * SPAN + tl.arange(0, BLOCK_K)
    x_at = x + sources[:, None] * K + columns[None, :]
    lines = a + adapter * a_stride + rows[:, None].to(tl.int64) * K
    has_row = (rows < ROWS)[:, None]
    for k in tl.static_range(0, SPAN, BLOCK_K):
        at = split * SPAN + k + tl.arange(0, BLOCK_K // LINE) * LINE
        prefetch_l2(lines + at[None, :], has_row & (at < K)[None, :])
    a_at = lines + columns[None, :]
    if PDL:
        gdc_wait()
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, SPAN, BLOCK_K, num_stages=4):
        inside = (k + columns < K)[None, :]
        values = tl.load(x_at + k, mask=is_real[:, None] & inside, other=0.0)
        factors = tl.load(a_at + k, mask=has_row & inside, other=0.0)
        sums = tl.dot(values.to(factors.dtype), factors.T, sums, input_precision="ieee")
    place = (split * num_tokens + sources)[:, None] * ROWS + rows[None, :]
    tl.store(out + place, sums, mask=is_real[:, None] & (rows < ROWS)[None, :])


@triton.jit
def shrink_few_kernel(
    x, a, adapters, out, norm_weight, num_tokens, a_stride,
    K: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one of the ROWS values of a token, over SPAN columns of K; NORM: of x * norm_weight.

    All of A is loaded before the wait.
    """
    if PDL:
        gdc_launch()
    row, split, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = tl.arange(0, BLOCK_K)
    columns = split * SPAN + at
    inside = (at < SPAN) & (columns < K)
    adapter = tl.load(adapters + token).to(tl.int64)
    a_at = a + tl.maximum(adapter, 0) * a_stride + row.to(tl.int64) * K
    factors = tl.load(a_at + columns, mask=inside & (adapter >= 0), other=0.0)
    if NORM:
        scales = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    values = tl.load(x + token * K + columns, mask=inside, other=0.0)
    if NORM:
        values = values.to(tl.float32) * scales
    else:
        values = values.to(factors.dtype).to(tl.float32)
    total = tl.sum(factors.to(tl.float32) * values, 0)
    tl.store(out + (split * num_tokens + token) * ROWS + row, total)


def lora_shrink(x: torch.Tensor, a: torch.Tensor, plan: LoraPlan) -> torch.Tensor:
    """Multiply by A; see `nv_kernels.reference.lora_shrink`.

    Args:
        x: [T, K].
        a: [S, P * R, K], R a power of two from 16 on.
        plan: the tokens by adapter.
    """
    x = x.contiguous()
    (tokens, columns), rows = x.shape, a.shape[1]
    block_n = min(next_power_of_2(rows), MOST_ROWS)
    span = cdiv(cdiv(columns, _splits(plan, columns)), BLOCK_K) * BLOCK_K
    splits = cdiv(columns, span)
    out = torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device)
    grid = (len(plan.tile_adapters), cdiv(rows, block_n), splits)
    shrink_kernel[grid](
        x, a, plan.places, plan.tile_adapters, out, tokens, a.stride(0),
        columns, rows, plan.tile, block_n, BLOCK_K, span,
        num_warps=4, **dependent_launch(x),
    )  # fmt: skip
    return out


def _splits(plan: LoraPlan, columns: int) -> int:
    """Programs along K: few values, as each is another kernel to compile."""
    if plan.is_batch_invariant:
        return INVARIANT_SPLITS
    least = LEAST_SPAN if plan.tile == LOW else MANY_SPAN
    return max(1, min(MOST_SPLITS, columns // least))


def shrink_few(
    x: torch.Tensor,
    a: torch.Tensor,
    adapters: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply one or two tokens by A, on the CUDA cores.

    Args:
        x: [T, K].
        a: [S, P * R, K].
        adapters: [T] int32; rows of NO_ADAPTER give zeros.
        norm_weight: [K], which x is multiplied by, without rounding; None: nothing.

    Returns:
        [Z, T, P * R] fp32, whose sum over Z is the product.
    """
    x = x.contiguous()
    (tokens, columns), rows = x.shape, a.shape[1]
    splits = cdiv(columns, FEW_SPAN)
    span = cdiv(columns, splits)
    out = torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device)
    shrink_few_kernel[(rows, splits, tokens)](
        x, a, adapters, out, x if norm_weight is None else norm_weight, tokens, a.stride(0),
        columns, rows, span, next_power_of_2(span), norm_weight is not None,
        num_warps=4, **dependent_launch(x),
    )  # fmt: skip
    return out
