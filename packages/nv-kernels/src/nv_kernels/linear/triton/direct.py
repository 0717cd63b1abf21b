"""One token times a weight of bf16 on Hopper, in few instructions: tensor cores, no detour.

Written in Gluon, whose layouts can be chosen. A sum may take its columns in any order, so a thread
loads 16 bytes of a row, and uses them as its part of the left operands of two products of one warp
(mma.sync); x is loaded in the same order. So weights go from memory to the registers in which they
are multiplied, before the wait for the previous kernel, and a product needs no shuffles. The warps
of a program share its rows and have their own columns: they meet once, when their sums are added.

A kernel of a chain of short ones takes about as long as its instructions after the wait are many:
with CUDA cores, as in `gemv`, gate and up need twice as many.

The norm's scale multiplies the finished row; x times the norm's weight is rounded to bf16. `tuned`
decides when to use it. Gluon is experimental: import this module only with `gluon_module`.
"""

# mypy: disable-error-code="assignment, misc, unreachable, var-annotated"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nv_kernels.launch.card import is_hopper
from nv_kernels.launch.triton_previous_gluon import let_next_start, wait_for_previous
from nv_kernels.linear.triton.fragments import along, four, high_half, low_half, multiply, times

if TYPE_CHECKING:
    from nv_kernels.linear.tuned import Direct

UNIT = 32  # columns of a warp's load: 8 rows of 64 bytes


@gluon.jit
def direct_kernel(
    x, weight, norm_weight, residual, out, eps, N,
    K: gl.constexpr, WARPS: gl.constexpr, ROWS: gl.constexpr, CHAINS: gl.constexpr,
    NORM: gl.constexpr, GATED: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Compute ROWS (8 or 16) of N outputs; GATED: 8 of gate and up, whose rows follow gate's N.

    x, weight and norm_weight are words of two columns. A product has 16 rows: the second 8 are up,
    or more rows, or zeros. CHAINS products do not wait for each other.
    """
    let_next_start()
    SHARE: gl.constexpr = K // WARPS  # columns of a warp
    CHUNKS: gl.constexpr = SHARE // 32
    BOTH: gl.constexpr = GATED or ROWS == 16
    lanes: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    quads: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 4], [1, 8, 4, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0]
    )
    line = along(1, 8, quads, 4)
    column = along(0, WARPS, quads, 4) * (SHARE // 2)
    column = column + along(2, 4, quads, 4) * 4 + along(3, 4, quads, 4)
    first = gl.program_id(0) * ROWS
    upper = weight + (first + line).to(gl.int64) * (K // 2) + column
    if GATED:
        lower = upper + N.to(gl.int64) * (K // 2)
    else:
        lower = upper + 8 * (K // 2)
    words = ()
    factors = ()
    for chunk in gl.static_range(CHUNKS):
        words = words + (gl.load(upper + chunk * 16, eviction_policy="evict_first"),)
        if BOTH:
            words = words + (gl.load(lower + chunk * 16, eviction_policy="evict_first"),)
        if NORM:
            factors = factors + (gl.load(norm_weight + column + line * 0 + chunk * 16),)
    added: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    flat: gl.constexpr = gl.SliceLayout(0, added)
    row = first + along(0, 8, flat, 2) + along(1, 4, flat, 2) * 0
    is_stored = along(1, 4, flat, 2) + along(0, 8, flat, 2) * 0 == 0  # four threads have a row
    order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    upper_sums = gl.allocate_shared_memory(gl.float32, [WARPS, 8, 4], order)
    lower_sums = gl.allocate_shared_memory(gl.float32, [WARPS, 8, 4], order)
    square_sums = gl.allocate_shared_memory(gl.float32, [WARPS, 8, 4], order)
    wait_for_previous()
    values = ()
    for chunk in gl.static_range(CHUNKS):
        values = values + (gl.load(x + column + line * 0 + chunk * 16),)
    if RESIDUAL:
        before = gl.load(residual + row, mask=is_stored, other=0.0).to(gl.float32)
        if BOTH:
            before_lower = gl.load(residual + row + 8, mask=is_stored, other=0.0).to(gl.float32)
    none = gl.zeros([WARPS, 8, 4], gl.float32, lanes)
    zero = gl.zeros([WARPS, 8, 4], gl.int32, lanes)
    sums = ()
    for _ in gl.static_range(CHAINS * 4):
        sums = sums + (none,)
    squares = gl.zeros([WARPS, 8, 4, 4], gl.float32, quads)
    for chunk in gl.static_range(CHUNKS):
        value = values[chunk]
        if NORM:
            low, high = low_half(value), high_half(value)
            squares += low * low
            squares += high * high
            value = times(value, factors[chunk])
        xs = four(value, lanes)
        if BOTH:
            a = four(words[chunk * 2], lanes)
            b = four(words[chunk * 2 + 1], lanes)
        else:
            a = four(words[chunk], lanes)
            b = (zero, zero, zero, zero)
        new = ()
        for chain in gl.static_range(CHAINS):
            mine = (
                sums[chain * 4], sums[chain * 4 + 1], sums[chain * 4 + 2], sums[chain * 4 + 3]
            )  # fmt: skip
            if (chunk * 2) % CHAINS == chain:
                mine = multiply(a[0], b[0], a[1], b[1], xs[0], xs[1], mine)
            if (chunk * 2 + 1) % CHAINS == chain:
                mine = multiply(a[2], b[2], a[3], b[3], xs[2], xs[3], mine)
            new = new + (mine[0], mine[1], mine[2], mine[3])
        sums = new
    top = sums[0]
    bottom = sums[2]
    for chain in gl.static_range(1, CHAINS):
        top += sums[chain * 4]
        bottom += sums[chain * 4 + 2]
    upper_sums.store(top)
    if BOTH:
        lower_sums.store(bottom)
    if NORM:
        square_sums.store(gl.convert_layout(gl.sum(squares, 3), lanes, assert_trivial=True))
    gl.thread_barrier()
    y = gl.sum(upper_sums.load(added), 0)
    if BOTH:
        z = gl.sum(lower_sums.load(added), 0)
    if NORM:
        total = gl.sum(gl.sum(square_sums.load(added), 0), 1)
        inverse = gl.expand_dims(gl.rsqrt(total / K + eps), 1)
        y = y * inverse
        if BOTH:
            z = z * inverse
    if GATED:
        y = y / (1.0 + gl.exp(-y)) * z
    if RESIDUAL:
        y = y.to(out.dtype.element_ty).to(gl.float32) + before
        if BOTH:
            z = z.to(out.dtype.element_ty).to(gl.float32) + before_lower
    gl.store(out + row, y.to(out.dtype.element_ty), mask=is_stored)
    if BOTH and not GATED:
        gl.store(out + row + 8, z.to(out.dtype.element_ty), mask=is_stored)


def direct(
    form: Direct,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply one token by a weight; `direct_fits` must hold.

    Args:
        form: the settings.
        x: [1, K] bf16.
        weight: [N, K] bf16, or [2F, K] (gate rows, then up rows) where gated.
        norm: weight [K] and eps of an RMS norm of x, or None.
        gated: return silu(gate) * up, [1, F].
        residual: [1, N] bf16, added to the result, or None; not where gated.

    Returns:
        [1, N] or [1, F] bf16.
    """
    rows, columns = weight.shape
    outputs = rows // 2 if gated else rows
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    norm_weight, eps = norm or (x, 0.0)
    direct_kernel[(outputs // form.rows,)](
        x.view(torch.int32), weight.view(torch.int32), norm_weight.view(torch.int32),
        x if residual is None else residual, out, eps, outputs,
        columns, form.warps, form.rows, form.chains, norm is not None, gated, residual is not None,
        num_warps=form.warps, launch_pdl=True,
    )  # fmt: skip
    return out


def direct_fits(
    form: Direct,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
) -> bool:
    """Return whether the kernel supports these."""
    rows, columns = weight.shape
    tensors = (x, weight) if norm is None else (x, weight, norm[0])
    return (
        is_hopper(x)
        and x.shape[0] == 1
        and all(each.dtype == torch.bfloat16 for each in tensors)
        and all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in tensors)
        and columns % (UNIT * form.warps) == 0
        and (rows // 2 if gated else rows) % form.rows == 0
        and (form.rows == 8 or not gated)
    )
