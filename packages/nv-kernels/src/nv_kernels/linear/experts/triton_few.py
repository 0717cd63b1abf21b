"""A few tokens times their experts' weights, on the CUDA cores, at the rate of reading weights.

A program computes some outputs of one entry. All entries' programs for the same outputs follow each
other, so that entries of one expert find its weights in the L2 cache. Weights cannot be loaded
before the wait for the previous kernel, which chooses the experts.
"""

# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.launch.triton_previous import wait_for_previous
from nv_kernels.linear.experts.triton_gate import constants, gated

if TYPE_CHECKING:
    import torch

    from nv_kernels.linear.experts.gate import Gate
    from nv_kernels.linear.experts.routing import Routing

WARPS = 4
WIDEST = 1024  # columns per load: 8 per thread
REGISTERS = 64  # per thread, for the weights of a program


@triton.jit
def _row(ptr, columns, K: tl.constexpr, EVEN: tl.constexpr):
    """Load some columns of a row in fp32, 0 past its end."""
    if EVEN:
        return tl.load(ptr + columns).to(tl.float32)
    else:
        return tl.load(ptr + columns, mask=columns < K, other=0.0).to(tl.float32)


@triton.jit
def _rows(
    ptr, rows, columns, N: tl.constexpr, K: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """Load some columns of some rows of a matrix [N, K] in fp32, 0 outside."""
    at = ptr + rows[:, None].to(tl.int64) * K + columns[None, :]
    if EVEN_N and EVEN_K:
        return tl.load(at).to(tl.float32)
    else:
        inside = (rows < N)[:, None] & (columns < K)[None, :]
        return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_entries"])
def few_kernel(
    x, weight, bias, experts, scales, out, num_entries,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute ROWS of an entry's N outputs.

    GATED: x [T, K], weight [E, 2N, K], bias [E, 2N] -> gated [T, k, N]. Else: x [T, k, K], weight
    [E, N, K], bias [E, N] -> partials [k, T, N], multiplied by the routing's weights.
    """
    wait_for_previous(PDL)
    EVEN_N: tl.constexpr = N % ROWS == 0
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    entry = tl.program_id(0)
    expert = tl.load(experts + entry).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK_K)
    sums = tl.zeros([ROWS, BLOCK_K], tl.float32)
    if GATED:
        matrix = weight + expert * (2 * N * K)
        line = x + (entry // TOP_K).to(tl.int64) * K
        up_sums = tl.zeros([ROWS, BLOCK_K], tl.float32)
    else:
        matrix = weight + expert * (N * K)
        line = x + entry.to(tl.int64) * K
    for first in tl.static_range(0, K, BLOCK_K):
        values = _row(line, first + at, K, EVEN_K)[None, :]
        sums += _rows(matrix, rows, first + at, N, K, EVEN_N, EVEN_K) * values
        if GATED:
            up_sums += _rows(matrix + N * K, rows, first + at, N, K, EVEN_N, EVEN_K) * values
    y = tl.sum(sums, 1)
    if bias is not None:
        added = bias + expert * (2 * N if GATED else N) + rows
        y += tl.load(added, mask=rows < N, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(up_sums, 1)
        if bias is not None:
            up += tl.load(added + N, mask=rows < N, other=0.0).to(tl.float32)
        y = gated(y, up, ALPHA, LIMIT, SHIFT)
        place = entry.to(tl.int64) * N
    else:
        y = y * tl.load(scales + entry).to(tl.float32)
        slot, token = entry % TOP_K, entry // TOP_K
        place = (slot * (num_entries // TOP_K) + token).to(tl.int64) * N
    tl.store(out + place + rows, y.to(out.dtype.element_ty), mask=rows < N)


def few(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    out: torch.Tensor,
    *,
    gate: Gate | None,
) -> None:
    """Multiply each entry by its expert's matrix.

    Args:
        x: [T, K] if gated, else [T, k, K].
        weight: [E, 2N, K] if gated, else [E, N, K].
        bias: [E, 2N] or [E, N], or None.
        routing: of the tokens.
        out: [T, k, N] if gated, else [k, T, N].
        gate: of the products; None: multiply by the routing's weights.
    """
    num_entries, outputs, columns = routing.experts.numel(), out.shape[2], x.shape[-1]
    rows, block_k = program_shape(outputs, columns, gate is not None)
    few_kernel[(num_entries, cdiv(outputs, rows))](
        x, weight, bias, routing.experts, routing.weights, out, num_entries, outputs, columns,
        routing.experts.shape[1], *constants(gate), rows, block_k, num_warps=WARPS,
        **dependent_launch(x),
    )  # fmt: skip


def program_shape(outputs: int, columns: int, gated: bool) -> tuple[int, int]:
    """Choose outputs per program and columns per load, so that the weights fit in registers.

    Args:
        outputs: N.
        columns: K.
        gated: each output reads two rows of the weight.
    """
    block_k = columns & -columns  # the largest power of two that divides K
    block_k = min(WIDEST, block_k if block_k >= 128 else next_power_of_2(columns))
    rows = 8
    while rows > 1 and (rows > outputs or rows * columns * (1 + gated) > REGISTERS * 64 * WARPS):
        rows //= 2
    return rows, block_k
