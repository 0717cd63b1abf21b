"""Tokens times a weight; the bits of a token's result do not depend on the other tokens.

Every token's products are summed in one order, which depends on the weight's shape alone: K is
divided into SPLITS parts; each part is summed by dots of BLOCK_K columns, in order, in fp32; then
the parts are added, in order. With few tokens the parts are spread over programs, whose partials
the next kernel adds; with many tokens, a program computes all parts of its tile and adds them in
registers. Both ways compute the same dots, of the same shape, and the same sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv
from nv_kernels.launch.triton_previous import wait_for_previous
from nv_kernels.linear.triton.result import empty_result

FEW_TOKENS = 256  # up to this number the parts are spread over programs
PROGRAMS = 128  # number of programs that the parts aim at with one tile of tokens
PART_COLUMNS = 512  # least columns of a part: shorter parts cost as much time
MAX_PARTS = 8


@dataclass(frozen=True)
class DotShape:
    """The shape of a dot and the settings of its loop, for all numbers of tokens.

    Attributes:
        block_m: tokens per tile.
        block_n: weight rows per tile.
        block_k: columns per iteration of the loop.
        stages: stages of the software pipeline.
        warps: warps per program.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int


HALF = DotShape(64, 128, 64, 4, 4)
SINGLE = DotShape(64, 64, 32, 2, 4)


@triton.jit(do_not_specialize=["M", "parts_each"])
def batch_invariant_linear_kernel(
    x, weight, bias, out, M, N, parts_each,
    K: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a [BLOCK_M, BLOCK_N] tile over parts_each parts of COLUMNS columns each.

    x [M, K], weight [N, K]; out [P, M, N], P programs on axis 1. GROUP tiles of tokens use the same
    weight rows at the same time, so that the weight is read once for all of them. EVEN: BLOCK_K
    divides K.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    band = tile // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    inside = tile % (GROUP * tiles_n)
    tokens = (band * GROUP + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = (inside // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_part = tl.program_id(1) * parts_each
    columns = tl.arange(0, BLOCK_K)
    # Rows past the last read real rows, each another one, and are not stored.
    x_at = x + (tokens % M).to(tl.int64)[:, None] * K + columns[None, :]
    weight_at = weight + (outputs % N).to(tl.int64)[:, None] * K + columns[None, :]
    wait_for_previous(PDL)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for part in range(first_part, first_part + parts_each):
        start = part * COLUMNS
        end = tl.minimum(start + COLUMNS, K)
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(start, end, BLOCK_K, num_stages=STAGES):
            if EVEN:
                a = tl.load(x_at + k)
                b = tl.load(weight_at + k)
            else:
                a = tl.load(x_at + k, mask=(k + columns < K)[None, :], other=0.0)
                b = tl.load(weight_at + k, mask=(k + columns < K)[None, :], other=0.0)
            sums = tl.dot(a, b.T, sums, input_precision="ieee")
        total += sums
    if BIAS:
        total += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    place = (tl.program_id(1) * tl.cast(M, tl.int64) + tokens[:, None]) * N + outputs[None, :]
    mask = (tokens < M)[:, None] & (outputs < N)[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


def num_parts(rows: int, columns: int, dots: DotShape) -> int:
    """Choose the number of parts of a weight's columns, by its shape alone.

    Args:
        rows: N.
        columns: K.
        dots: the shape of a dot.

    Returns:
        As many as fill the card with one tile of tokens; 1 if the rows alone fill it.
    """
    wanted = PROGRAMS // -(-rows // dots.block_n)
    return max(1, min(wanted, columns // PART_COLUMNS, MAX_PARTS))


def batch_invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply each row by the transposed weight, bitwise the same whatever the other rows are.

    Args:
        x: [T, K].
        weight: [N, K], in x's dtype.
        bias: [N] or None.

    Returns:
        [T, N] in x's dtype, accumulated in fp32.
    """
    return _launch(x, weight, bias, spread=False)


def batch_invariant_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Score each token of the vocabulary, bitwise the same whatever the other rows are.

    Args:
        hidden: [R, E].
        weight: [V, E], in hidden's dtype.

    Returns:
        [R, V] fp32, accumulated in fp32.
    """
    return _launch(hidden, weight, None, spread=False, dtype=torch.float32)


def batch_invariant_partials(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply as `batch_invariant_linear`, for a consumer that sums partials.

    Args:
        x: [T, K].
        weight: [N, K], in x's dtype.
        bias: [N] or None.

    Returns:
        [T, N] in x's dtype, or [P, T, N] fp32 partials if there are few tokens.
    """
    return _launch(x, weight, bias, spread=bias is None and x.shape[0] <= FEW_TOKENS)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    spread: bool,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    (tokens, columns), rows = x.shape, weight.shape[0]
    dots = SINGLE if x.dtype == torch.float32 else HALF
    parts = num_parts(rows, columns, dots)
    steps = cdiv(cdiv(columns, parts), dots.block_k)
    parts = cdiv(columns, steps * dots.block_k)  # no part is empty
    programs = parts if spread else 1
    out = empty_result(programs, tokens, rows, dtype or x.dtype, x.device)
    if tokens:
        tiles = cdiv(tokens, dots.block_m) * cdiv(rows, dots.block_n)
        batch_invariant_linear_kernel[tiles, programs](
            x, weight, x if bias is None else bias, out, tokens, rows, parts // programs,
            columns, steps * dots.block_k, dots.block_m, dots.block_n, dots.block_k, 8,
            dots.stages, bias is not None, columns % dots.block_k == 0,
            num_warps=dots.warps, **dependent_launch(x),
        )  # fmt: skip
    return out
