"""Tokens times the A of their adapters: in tiles of one adapter's tokens, or for one or two tokens.

K is split over programs, whose sums `lora_expand` adds.
"""

# mypy: disable-error-code="assignment, unreachable, var-annotated"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.launch.triton_previous import wait_for_previous
from nv_kernels.linear.lora.plan import LOW

if TYPE_CHECKING:
    from nv_kernels.linear.lora.plan import LoraPlan

BLOCK_K = 128
MOST_ROWS = 64  # of A, per program
PROGRAMS = 256  # that a launch should have
MOST_SPLITS = 16
INVARIANT_SPLITS = 4
MANY_SPLITS = 2  # of steps with tiles of HIGH tokens
FEW_BLOCK_K = 1024


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    x, a, places, tile_adapters, out, num_tokens, a_stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N of the ROWS values of a tile, over SPAN columns of K."""
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    adapter = tl.load(tile_adapters + tile).to(tl.int64)
    tokens = tl.load(places + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    wait_for_previous(PDL)
    if adapter < 0:
        return
    is_real = tokens >= 0
    sources = tl.where(is_real, tokens, 0).to(tl.int64)
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = split * SPAN + tl.arange(0, BLOCK_K)
    x_at = x + sources[:, None] * K + columns[None, :]
    a_at = a + adapter * a_stride + rows[:, None].to(tl.int64) * K + columns[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, SPAN, BLOCK_K, num_stages=4):
        inside = (k + columns < K)[None, :]
        values = tl.load(x_at + k, mask=is_real[:, None] & inside, other=0.0)
        factors = tl.load(a_at + k, mask=inside, other=0.0)
        sums = tl.dot(values.to(factors.dtype), factors.T, sums, input_precision="ieee")
    place = (split * num_tokens + sources)[:, None] * ROWS + rows[None, :]
    tl.store(out + place, sums, mask=is_real[:, None])


@triton.jit
def shrink_few_kernel(
    x, a, adapters, out, norm_weight, eps, num_tokens, a_stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, SPAN: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one of the ROWS values of a token, over SPAN columns of K; NORM: of the normed x."""
    row, split, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    adapter = tl.load(adapters + token).to(tl.int64)
    at = tl.arange(0, BLOCK_K)
    a_at = a + tl.maximum(adapter, 0) * a_stride + row.to(tl.int64) * K + split * SPAN
    wait_for_previous(PDL)
    sums = tl.zeros([BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for k in range(0, SPAN, BLOCK_K):
        inside = split * SPAN + k + at < K
        factors = tl.load(a_at + k + at, mask=inside & (adapter >= 0), other=0.0)
        values = tl.load(x + token * K + split * SPAN + k + at, mask=inside, other=0.0)
        if NORM:
            values = values.to(tl.float32)
            squares += values * values
            values *= tl.load(norm_weight + split * SPAN + k + at, mask=inside, other=0.0).to(
                tl.float32
            )
        else:
            values = values.to(factors.dtype).to(tl.float32)
        sums += factors.to(tl.float32) * values
    total = tl.sum(sums, 0)
    if NORM:
        total *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
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
    block_n = rows
    while block_n > MOST_ROWS or rows % block_n or block_n & (block_n - 1):
        block_n = next(n for n in (64, 32, 16) if n < block_n and rows % n == 0)
    splits = _splits(plan, tokens, rows // block_n, columns)
    span = cdiv(cdiv(columns, splits), BLOCK_K) * BLOCK_K
    splits = cdiv(columns, span)
    out = torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device)
    grid = (len(plan.tile_adapters), rows // block_n, splits)
    shrink_kernel[grid](
        x, a, plan.places, plan.tile_adapters, out, tokens, a.stride(0),
        columns, rows, plan.tile, block_n, BLOCK_K, span,
        num_warps=4, **dependent_launch(x),
    )  # fmt: skip
    return out


def _splits(plan: LoraPlan, tokens: int, blocks: int, columns: int) -> int:
    """Programs along K: few values, as each is another kernel to compile."""
    if plan.is_batch_invariant:
        return INVARIANT_SPLITS
    if plan.tile > LOW:
        return MANY_SPLITS
    programs = max(next_power_of_2(tokens) // LOW, 1) * blocks
    return min(MOST_SPLITS, cdiv(PROGRAMS, programs), cdiv(columns, 2 * BLOCK_K))


def shrink_few(
    x: torch.Tensor,
    a: torch.Tensor,
    adapters: torch.Tensor,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """Multiply one or two tokens by A, on the CUDA cores.

    Args:
        x: [T, K].
        a: [S, P * R, K].
        adapters: [T] int32; rows of NO_ADAPTER give zeros.
        norm: (weight [K], eps) of an RMS norm of x, or None. The normed values are not rounded.

    Returns:
        [Z, T, P * R] fp32, whose sum over Z is the product.
    """
    x = x.contiguous()
    (tokens, columns), rows = x.shape, a.shape[1]
    splits = 1 if norm else min(4, cdiv(128, rows * tokens), cdiv(columns, FEW_BLOCK_K))
    span = cdiv(cdiv(columns, splits), FEW_BLOCK_K) * FEW_BLOCK_K
    splits = cdiv(columns, span)
    out = torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device)
    weight, eps = norm or (x, 0.0)
    shrink_few_kernel[(rows, splits, tokens)](
        x, a, adapters, out, weight, eps, tokens, a.stride(0),
        columns, rows, FEW_BLOCK_K, span, norm is not None,
        num_warps=4, **dependent_launch(x),
    )  # fmt: skip
    return out
