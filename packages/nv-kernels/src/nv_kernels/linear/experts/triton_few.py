"""One or two tokens times their experts' weights, on the CUDA cores, as fast as weights are read.

A program computes some outputs of all experts of a token. A row is read by one warp, so its sum
needs no barrier. The norm of the tokens is in the first product's prologue; the second sums the
experts and adds the residual in its epilogue.

Weights cannot be loaded before the experts are chosen. But when the second product starts, the
choice has ended: if the caller says that the kernels follow each other, it loads its first weights
before the wait for the first product.
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
from nv_kernels.linear.experts.triton_gate import constants, gated

if TYPE_CHECKING:
    from nv_kernels.linear.experts.gate import Gate
    from nv_kernels.linear.experts.routing import Routing
    from nv_kernels.linear.stream import Norm

COLUMNS = 256  # per load of a warp: 8 per thread
GATED_ROWS, GATED_WARPS = 2, 4
"""Of a program: rows of gate, and of up, of each expert; warps, at most one per expert."""
DOWN_ROWS, DOWN_WARPS = 1, 8
"""The same of the last product."""
EARLY_CHUNKS = 4
"""Of COLUMNS: the most that a program of the last product loads of a row before the wait."""


@triton.jit
def _columns(lines, first, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Load some columns of vectors [K], one per warp, in fp32, 0 past their end."""
    columns = first + tl.arange(0, COLUMNS)
    at = lines[:, None] + columns[None, :]
    if K % COLUMNS == 0:
        return tl.load(at).to(tl.float32)
    else:
        return tl.load(at, mask=(columns < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _weights(
    matrices, rows, slots, first, N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load some columns of some rows of some matrices [N, K]: [SLOTS, ROWS, COLUMNS], 0 outside.

    In this order of dimensions the compiler spreads the slots over the warps. Rows are read once:
    L2 gives them up first, and keeps what other kernels read.
    """
    columns = first + tl.arange(0, COLUMNS)
    at = matrices[:, None, None] + rows[None, :, None] * K + columns[None, None, :]
    if N % ROWS == 0 and K % COLUMNS == 0 and TOP_K == SLOTS:
        return tl.load(at, eviction_policy="evict_first")
    else:
        inside = (slots < TOP_K)[:, None, None] & (rows < N)[None, :, None]
        inside &= (columns < K)[None, None, :]
        return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def few_gated_kernel(
    x, norm_weight, weight, bias, experts, out, eps,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute ROWS of the N gated outputs of each expert of a token: out [T, k, N].

    x [T, K], weight [E, 2N, K], bias [E, 2N] or None. norm_weight [K]: x is normed; None: it is
    normed already. EARLY: x is older than the previous kernel.
    """
    if not EARLY:
        wait_for_previous(PDL)
    slots = tl.arange(0, SLOTS)
    same = tl.zeros([SLOTS], tl.int32)
    lines = x + tl.program_id(1) * K + same
    if norm_weight is not None:
        squares = tl.zeros([SLOTS, COLUMNS], tl.float32)
        for first in tl.static_range(0, K, COLUMNS):
            values = _columns(lines, first, K, COLUMNS)
            squares += values * values
        inverse = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
    if EARLY:
        wait_for_previous(PDL)
    entries = tl.program_id(1) * TOP_K + slots
    ids = tl.load(experts + entries, mask=slots < TOP_K, other=0).to(tl.int64)
    matrices = weight + ids * (2 * N * K)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gates = tl.zeros([SLOTS, ROWS, COLUMNS], tl.float32)
    ups = tl.zeros([SLOTS, ROWS, COLUMNS], tl.float32)
    for first in tl.static_range(0, K, COLUMNS):
        gate = _weights(matrices, rows, slots, first, N, K, TOP_K, ROWS, SLOTS, COLUMNS)
        up = _weights(matrices + N * K, rows, slots, first, N, K, TOP_K, ROWS, SLOTS, COLUMNS)
        values = _columns(lines, first, K, COLUMNS)
        if norm_weight is not None:
            values *= _columns(norm_weight + same, first, K, COLUMNS)
        gates += gate.to(tl.float32) * values[:, None, :]
        ups += up.to(tl.float32) * values[:, None, :]
    gate = tl.sum(gates, 2)  # [SLOTS, ROWS]
    up = tl.sum(ups, 2)
    if norm_weight is not None:
        gate *= inverse
        up *= inverse
    inside = (slots < TOP_K)[:, None] & (rows < N)[None, :]
    if bias is not None:
        added = bias + (ids * (2 * N))[:, None] + rows[None, :]
        gate += tl.load(added, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(added + N, mask=inside, other=0.0).to(tl.float32)
    y = gated(gate, up, ALPHA, LIMIT, SHIFT)
    tl.store(out + entries[:, None] * N + rows[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def few_down_kernel(
    x, weight, bias, experts, scales, residual, out, num_tokens,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, SUM: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, COLUMNS: tl.constexpr, HELD: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute ROWS of the N outputs of a token, times the routing's weights.

    x [T, k, K], weight [E, N, K], bias [E, N] or None. SUM: the experts are summed, rounded, and
    added to residual [T, N] if there is one: out [T, N]. Else out [k, T, N]. HELD chunks of the
    weight are loaded before the wait if the routing is older than the previous kernel (EARLY).
    """
    if not EARLY:
        wait_for_previous(PDL)
    token = tl.program_id(1)
    slots = tl.arange(0, SLOTS)
    entries = token * TOP_K + slots
    ids = tl.load(experts + entries, mask=slots < TOP_K, other=0).to(tl.int64)
    scale = tl.load(scales + entries, mask=slots < TOP_K, other=0.0).to(tl.float32)
    matrices = weight + ids * (N * K)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = ()
    for chunk in tl.static_range(HELD):
        first = chunk * COLUMNS
        held = held + (_weights(matrices, rows, slots, first, N, K, TOP_K, ROWS, SLOTS, COLUMNS),)
    if EARLY:
        wait_for_previous(PDL)
    sums = tl.zeros([SLOTS, ROWS, COLUMNS], tl.float32)
    for chunk in tl.static_range(HELD):
        values = _values(x, entries, slots, chunk * COLUMNS, K, TOP_K, SLOTS, COLUMNS)
        sums += held[chunk].to(tl.float32) * values[:, None, :]
    for first in tl.range(HELD * COLUMNS, K, COLUMNS):
        some = _weights(matrices, rows, slots, first, N, K, TOP_K, ROWS, SLOTS, COLUMNS)
        values = _values(x, entries, slots, first, K, TOP_K, SLOTS, COLUMNS)
        sums += some.to(tl.float32) * values[:, None, :]
    y = tl.sum(sums, 2)  # [SLOTS, ROWS]
    inside = (slots < TOP_K)[:, None] & (rows < N)[None, :]
    if bias is not None:
        added = bias + (ids * N)[:, None] + rows[None, :]
        y += tl.load(added, mask=inside, other=0.0).to(tl.float32)
    y = y * scale[:, None]
    dtype: tl.constexpr = out.dtype.element_ty
    if SUM:
        total = tl.sum(y, 0)
        place = token * N + rows
        if residual is not None:
            total = total.to(dtype).to(tl.float32)
            total += tl.load(residual + place, mask=rows < N, other=0.0).to(tl.float32)
        tl.store(out + place, total.to(dtype), mask=rows < N)
    else:
        place = (slots * num_tokens + token)[:, None].to(tl.int64) * N + rows[None, :]
        tl.store(out + place, y.to(dtype), mask=inside)


@triton.jit
def _values(
    x, entries, slots, first, K: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load some columns of entries [SLOTS] in fp32, 0 outside."""
    columns = first + tl.arange(0, COLUMNS)
    at = x + entries[:, None] * K + columns[None, :]
    if K % COLUMNS == 0 and TOP_K == SLOTS:
        return tl.load(at).to(tl.float32)
    else:
        inside = (slots < TOP_K)[:, None] & (columns < K)[None, :]
        return tl.load(at, mask=inside, other=0.0).to(tl.float32)


def few_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    gate: Gate,
    norm: Norm | None = None,
    *,
    is_after_choice: bool = False,
) -> torch.Tensor:
    """Multiply each token by gate and up of its experts, and gate.

    Args:
        x: [T, K].
        weight: [E, 2N, K].
        bias: [E, 2N] or None.
        routing: of the tokens.
        gate: of the products.
        norm: of x; None: x is normed already.
        is_after_choice: the previous kernel is the routing's, and x is older.

    Returns:
        [T, k, N].
    """
    (num_tokens, top_k), outputs = routing.experts.shape, weight.shape[1] // 2
    out = torch.empty(num_tokens, top_k, outputs, dtype=x.dtype, device=x.device)
    slots = next_power_of_2(top_k)
    if out.numel():
        few_gated_kernel[(cdiv(outputs, GATED_ROWS), num_tokens)](
            x, None if norm is None else norm.weight, weight, bias, routing.experts, out,
            0.0 if norm is None else norm.eps, outputs, x.shape[1], top_k, *constants(gate),
            GATED_ROWS, slots, COLUMNS, is_after_choice, num_warps=min(GATED_WARPS, slots),
            **dependent_launch(x),
        )  # fmt: skip
    return out


def few_down(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    residual: torch.Tensor | None = None,
    *,
    is_summed: bool = True,
    is_after_gated: bool = False,
) -> torch.Tensor:
    """Multiply by each expert's last matrix, and by the routing's weight.

    Args:
        x: [T, k, K], gated.
        weight: [E, N, K].
        bias: [E, N] or None.
        routing: of the tokens.
        residual: added to the sum [T, N], or None.
        is_summed: sum the experts.
        is_after_gated: the previous kernel made x, and the routing is older.

    Returns:
        The sum [T, N], or partials [k, T, N].
    """
    (num_tokens, top_k), (outputs, columns) = routing.experts.shape, weight.shape[1:]
    shape = (num_tokens, outputs) if is_summed else (top_k, num_tokens, outputs)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    slots = next_power_of_2(top_k)
    if out.numel():
        few_down_kernel[(cdiv(outputs, DOWN_ROWS), num_tokens)](
            x, weight, bias, routing.experts, routing.weights, residual, out, num_tokens, outputs,
            columns, top_k, is_summed, DOWN_ROWS, slots, COLUMNS,
            min(EARLY_CHUNKS, cdiv(columns, COLUMNS)), is_after_gated,
            num_warps=min(DOWN_WARPS, slots),
            **dependent_launch(x),
        )  # fmt: skip
    return out
