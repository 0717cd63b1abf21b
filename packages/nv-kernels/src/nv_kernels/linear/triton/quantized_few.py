"""One token times a weight of 4 bits on Hopper, with the products that one warp issues alone.

Written in Gluon, whose layouts can be chosen: codes lie in memory in the order in which a warp's
threads hold the left operand, so they go from memory to registers and are unpacked there. Each warp
of a program has its own columns and all of the program's rows, so the warps meet only at the end,
where their sums are added through shared memory. A product of one warp (unlike Hopper's products of
four warps) is ordinary code to the compiler: codes are unpacked and loaded while it runs.

A code is used as 128 + code, which costs no subtraction: a product by ones gives the sum of x, and
(128 + zero) times it is subtracted from each group's sum, in fp32.

The prologue adds what is pending and norms x, the epilogue adds the residual, as in `gemv`: so a
layer has no launch of its own for a norm. `tuned` decides when to use it. Gluon is experimental:
import this module only with `gluon_module`.
"""

# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nv_kernels.launch.sizes import cdiv
from nv_kernels.launch.triton_previous_gluon import let_next_start, wait_for_previous
from nv_kernels.linear.triton.fragments import MULTIPLY, along, four
from nv_kernels.linear.triton.quantized_layout import UNPACK_WORD
from nv_kernels.linear.triton.result import empty_result

if TYPE_CHECKING:
    from nv_kernels.linear.quantized.tuned import Warps
    from nv_kernels.linear.triton.quantized_layout import LaidOut

UNIT = gl.constexpr(256)  # words of 16 rows by 128 columns
# Of a half of the chunk a word is the whole left operand of a product of 16 columns.
UNPACK = gl.constexpr(UNPACK_WORD + "}")
SUM = gl.constexpr("""{
    .reg .b32 one;
    mov.b32 one, 0x3F803F80;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
        {$0, $1, $2, $3}, {one, one, one, one}, {$4, $5}, {$6, $7, $8, $9};
}""")


@gluon.jit
def _unpack(word):
    return gl.inline_asm_elementwise(
        UNPACK, "=&r,=&r,=&r,=&r,r", [word], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _multiply(codes, low, high, sums):
    """Add the product of 16 rows and 16 columns (8 low, 8 high) to a thread's 4 sums."""
    return gl.inline_asm_elementwise(
        MULTIPLY, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [codes[0], codes[1], codes[2], codes[3], low, high, sums[0], sums[1], sums[2], sums[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _add(low, high, sums):
    """Add 16 columns of x to their sum, which each of a thread's 4 sums has."""
    return gl.inline_asm_elementwise(
        SUM, "=f,=f,=f,=f,r,r,f,f,f,f", [low, high, sums[0], sums[1], sums[2], sums[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _x_of(tiles, chunk, quads: gl.constexpr, lanes: gl.constexpr):
    """Read a thread's 16 words of a chunk; each of the 8 places for tokens has the one token."""
    lows = ()
    highs = ()
    for quarter in gl.static_range(4):
        low, high, next_low, next_high = four(tiles.index(chunk * 4 + quarter).load(quads), lanes)
        lows = lows + (low, next_low)
        highs = highs + (high, next_high)
    return lows + highs


@gluon.jit
def _load(codes, inside, unit, chunk, K: gl.constexpr):
    """Load a unit's chunk: two quads of words."""
    at = codes + (unit.to(gl.int64) * (K // 128) + chunk) * UNIT
    low = gl.load(at + inside, eviction_policy="evict_first")
    high = gl.load(at + (inside + 128), eviction_policy="evict_first")
    return (low, high)


@gluon.jit
def _load_scales(scale, zeros, rows, unit, ZEROS: gl.constexpr):
    """Load the scales of a thread's two rows, and their (128 + zero)."""
    upper = gl.load(scale + unit * 16 + rows)
    lower = gl.load(scale + unit * 16 + rows + 8)
    if ZEROS:
        return (upper, lower, gl.load(zeros + unit * 16 + rows),
                gl.load(zeros + unit * 16 + rows + 8))  # fmt: skip
    else:
        return (upper, lower)


@gluon.jit
def _at(words, scales, index: gl.constexpr, ZEROS: gl.constexpr):
    """Return what `_load` and `_load_scales` returned for the index-th unit and chunk."""
    if ZEROS:
        found = (scales[index * 4], scales[index * 4 + 1], scales[index * 4 + 2],
                 scales[index * 4 + 3])  # fmt: skip
    else:
        found = (scales[index * 2], scales[index * 2 + 1])
    return (words[index * 2], words[index * 2 + 1]), found


@gluon.jit
def _sums_of(totals, place: gl.constexpr):
    return totals[place * 4], totals[place * 4 + 1], totals[place * 4 + 2], totals[place * 4 + 3]


@gluon.jit
def _round(
    turn, words, scales, totals, base, scale, zeros, inside, row, first_column, group, last,
    x_words, sums, N, lanes: gl.constexpr, quads: gl.constexpr,
    K: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr, GROUPS: gl.constexpr,
    STEPS: gl.constexpr, UNITS: gl.constexpr, CHUNKS: gl.constexpr, DEPTH: gl.constexpr,
    GATED: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """Multiply the DEPTH steps in registers and load the next; store the sums of ended groups."""
    ROUNDS: gl.constexpr = GROUPS * STEPS // DEPTH
    none = gl.zeros([WARPS, 8, 4], gl.float32, lanes)
    next_words = ()
    next_scales = ()
    for ahead in gl.static_range(DEPTH):
        step = turn * DEPTH + ahead
        for each in gl.static_range(CHUNKS):
            if DEPTH % STEPS == 0:
                chunk = ahead % STEPS * CHUNKS + each
            else:
                chunk = step % STEPS * CHUNKS + each
            xs = _x_of(x_words, chunk, quads, lanes)
            x_sum = (none, none, none, none)
            for at in gl.static_range(8):
                x_sum = _add(xs[at], xs[8 + at], x_sum)
            later = step + DEPTH
            later_group = group + gl.minimum(later // STEPS, GROUPS - 1)
            later_chunk = later % STEPS * CHUNKS + each
            scale_at = (first_column + later_chunk * 128) // GROUP * N
            new_totals = ()
            for unit in gl.static_range(UNITS):
                now_words, now_scales = _at(
                    words, scales, (ahead * CHUNKS + each) * UNITS + unit, ZEROS
                )
                mine = four(now_words[0], lanes) + four(now_words[1], lanes)
                part = (none, none, none, none)
                for at in gl.static_range(8):
                    part = _multiply(_unpack(mine[at]), xs[at], xs[8 + at], part)
                upper, lower = now_scales[0].to(gl.float32), now_scales[1].to(gl.float32)
                if ZEROS:
                    upper_zero = now_scales[2].to(gl.float32)
                    lower_zero = now_scales[3].to(gl.float32)
                else:
                    upper_zero = 136.0
                    lower_zero = 136.0
                a, b, c, d = _sums_of(totals, unit)
                new_totals = new_totals + (
                    a + (part[0] - x_sum[0] * upper_zero) * upper,
                    b + (part[1] - x_sum[1] * upper_zero) * upper,
                    c + (part[2] - x_sum[2] * lower_zero) * lower,
                    d + (part[3] - x_sum[3] * lower_zero) * lower,
                )
                if ROUNDS > 1:
                    if GATED:
                        at_unit = later_group + unit * (N // 32)
                    else:
                        at_unit = gl.minimum(later_group * UNITS + unit, last)
                    next_words = next_words + _load(base, inside, at_unit, later_chunk, K)
                    next_scales = next_scales + _load_scales(
                        scale + scale_at, zeros + scale_at, row, at_unit, ZEROS
                    )
            totals = new_totals
        if (ahead + 1) % STEPS == 0 or ahead == DEPTH - 1:
            for unit in gl.static_range(UNITS):
                a, b, c, d = _sums_of(totals, unit)
                sums.index(step // STEPS * UNITS + unit).store(
                    gl.join(gl.join(a, b), gl.join(c, d))
                )
            if DEPTH % STEPS == 0:
                kept = 0.0
            else:  # a later round stores the sums of a group that has not ended
                kept = ((step + 1) % STEPS != 0).to(gl.float32)
            new_totals = ()
            for unit in gl.static_range(UNITS):
                a, b, c, d = _sums_of(totals, unit)
                new_totals = new_totals + (a * kept, b * kept, c * kept, d * kept)
            totals = new_totals
    if ROUNDS == 1:
        next_words = words
        next_scales = scales
    return next_words, next_scales, totals


@gluon.jit
def grouped_few_kernel(
    x, codes, scale, zeros, residual, norm_weight, out, total, eps, N,
    K: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr,
    GROUPS: gl.constexpr, UNITS: gl.constexpr, CHUNKS: gl.constexpr, DEPTH: gl.constexpr,
    PARTIALS: gl.constexpr, GATED: gl.constexpr, ZEROS: gl.constexpr, NORM: gl.constexpr,
    RESIDUAL: gl.constexpr, TRIGGER: gl.constexpr,
):  # fmt: skip
    """Compute GROUPS groups of UNITS units of 16 rows over COLUMNS columns.

    x [K], or if PARTIALS [PARTIALS, K] that are summed and added to the residual [K], which gives
    the total. NORM: x is normed. RESIDUAL: the residual [N] is added to the result. codes int32
    [N / 16, K / 128, 256] as `quantized_layout` has them; scale and zeros (128 + zero in bf16)
    [G, N]. GATED: UNITS is 2, a gate unit and the up unit that belongs to it. A step loads CHUNKS
    chunks of a group's units; DEPTH steps are in registers.
    """
    if TRIGGER == 1:
        let_next_start()
    SHARE: gl.constexpr = COLUMNS // 128 // WARPS  # chunks of a warp
    STEPS: gl.constexpr = SHARE // CHUNKS
    lanes: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    quads: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 4], [1, 8, 4, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0]
    )
    warp = along(0, WARPS, lanes, 3)
    row = along(1, 8, lanes, 3)
    part = gl.program_id(1)
    inside = along(0, WARPS, quads, 4) * (SHARE * UNIT) + along(1, 8, quads, 4) * 16
    inside += along(2, 4, quads, 4) * 4 + along(3, 4, quads, 4)
    base = codes + part * (COLUMNS // 128 * UNIT)
    first_column = part * COLUMNS + warp * (SHARE * 128)
    group = gl.program_id(0) * GROUPS
    last = N // 16 - 1
    words = ()
    scales = ()
    for early in gl.static_range(DEPTH):
        for early_chunk in gl.static_range(CHUNKS):
            for early_unit in gl.static_range(UNITS):
                if GATED:
                    early_at = group + early // STEPS + early_unit * (N // 32)
                else:
                    early_at = gl.minimum((group + early // STEPS) * UNITS + early_unit, last)
                words = words + _load(
                    base, inside, early_at, early % STEPS * CHUNKS + early_chunk, K
                )
                early_scale = first_column + (early % STEPS * CHUNKS + early_chunk) * 128
                early_scale = early_scale // GROUP * N
                scales = scales + _load_scales(
                    scale + early_scale, zeros + early_scale, row, early_at, ZEROS
                )

    spread: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2, 1, 2], [4, 1, 2, 4, 1], [1, WARPS, 1, 1, 1], [4, 2, 3, 0, 1]
    )
    # quarter of the chunk, warp, pair of columns in 8, (eighth in the quarter, half), column
    columns = (
        along(0, 4, spread, 5) * 16
        + along(1, WARPS, spread, 5) * (SHARE * 128)
        + along(2, 4, spread, 5) * 2
        + along(3, 4, spread, 5) // 2 * 8
        + along(3, 4, spread, 5) % 2 * 64
        + along(4, 2, spread, 5)
        + part * COLUMNS
    )
    x_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [SHARE, 4, WARPS, 4, 4, 2], gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    )
    factors = ()
    if NORM:
        for chunk in gl.static_range(SHARE):
            factors = factors + (gl.load(norm_weight + columns + chunk * 128),)
    if TRIGGER > 0:
        wait_for_previous()
        if TRIGGER == 2:
            let_next_start()
    values = ()
    for chunk in gl.static_range(SHARE):
        value = gl.load(x + columns + chunk * 128)
        if PARTIALS > 0:
            for partial in gl.static_range(1, PARTIALS):
                value += gl.load(x + columns + (partial * K + chunk * 128))
            before = gl.load(residual + columns + chunk * 128).to(gl.float32)
            value = (value.to(gl.bfloat16).to(gl.float32) + before).to(gl.bfloat16)
            if gl.program_id(0) == 0:
                gl.store(total + columns + chunk * 128, value)
        values = values + (value,)
    if NORM:
        squares = gl.zeros([4, WARPS, 4, 4, 2], gl.float32, spread)
        for chunk in gl.static_range(SHARE):
            value = values[chunk].to(gl.float32)
            squares += value * value
        inverse = gl.rsqrt(gl.sum(squares.reshape([WARPS * 128]), 0) / K + eps)
    for chunk in gl.static_range(SHARE):
        value = values[chunk]
        if NORM:
            rounded = (value.to(gl.float32) * inverse).to(factors[chunk].dtype).to(gl.float32)
            value = (rounded * factors[chunk].to(gl.float32)).to(gl.bfloat16)
        x_tiles.index(chunk).store(value)
    gl.thread_barrier()
    x_words = x_tiles._reinterpret(
        gl.int32, [SHARE * 4, WARPS, 1, 4, 4], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    )

    sums = gl.allocate_shared_memory(
        gl.float32, [GROUPS * UNITS, WARPS, 8, 4, 2, 2],
        gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0]),
    )  # fmt: skip
    none = gl.zeros([WARPS, 8, 4], gl.float32, lanes)
    totals = ()
    for _ in gl.static_range(UNITS * 4):
        totals = totals + (none,)
    for turn in range(GROUPS * STEPS // DEPTH):
        words, scales, totals = _round(
            turn, words, scales, totals, base, scale, zeros, inside, row, first_column, group, last,
            x_words, sums, N, lanes, quads,
            K, GROUP, WARPS, GROUPS, STEPS, UNITS, CHUNKS, DEPTH, GATED, ZEROS,
        )  # fmt: skip
    if TRIGGER == 3:
        let_next_start()
    gl.thread_barrier()
    added: gl.constexpr = gl.BlockedLayout(
        [WARPS, 1, 1, 1, 1], [1, 8, 4, 1, 1], [max(1, WARPS // 4), 1, 1, 2, 2], [1, 2, 3, 4, 0]
    )
    flat: gl.constexpr = gl.SliceLayout(0, added)
    place = along(1, 4, flat, 4) * 2 + along(2, 2, flat, 4)  # all 8 have the token's result
    feature = along(0, 8, flat, 4) + along(3, 2, flat, 4) * 8 + place * 0
    for turn in gl.static_range(GROUPS):
        for unit in gl.static_range(1 if GATED else UNITS):
            y = gl.sum(sums.index(turn * UNITS + unit).load(added), 0)
            if GATED:
                up = gl.sum(sums.index(turn * UNITS + 1).load(added), 0)
                y = y / (1.0 + gl.exp(-y)) * up
                output = (group + turn) * 16 + feature
                mask = (place == 0) & (output < N // 2)
            else:
                output = ((group + turn) * UNITS + unit) * 16 + feature
                mask = (place == 0) & (output < N)
            if RESIDUAL:
                before = gl.load(residual + output, mask=mask, other=0.0).to(gl.float32)
                y = y.to(out.dtype.element_ty).to(gl.float32) + before
            gl.store(out + part * N + output, y.to(out.dtype.element_ty), mask=mask)


def grouped_few(
    form: Warps,
    x: torch.Tensor,
    weight: LaidOut,
    *,
    gated: bool = False,
    dtype: torch.dtype | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply one token by a weight of 4 bits; `grouped_few_fits` must hold.

    Args:
        form: the settings; split_k is 1 with a norm, and where gated.
        x: [1, K] bf16, columns in the codes' order; or fp32 partials [P, 1, K] if there is a total.
        weight: [N, K], or [2F, K] (gate rows, then up rows) where gated.
        gated: return silu(gate) * up, [1, F].
        dtype: of the result, x's by default; partials are fp32.
        norm: weight [K] and eps of an RMS norm of x, or None.
        residual: bf16; with a total [1, K], added to x; else [1, N], added to the result (split_k
            is 1), or None.
        total: None, or bf16 [1, K], where the sum of x and the residual is written.

    Returns:
        [1, N] or [1, F]; [P, 1, N] partials if the form splits K.
    """
    rows, columns = weight.num_rows, weight.num_columns
    outputs = rows // 2 if gated else rows
    out = empty_result(form.split_k, 1, outputs, dtype or torch.bfloat16, x.device)
    norm_weight, eps = norm or (x, 0.0)
    has_zeros = weight.offset is not None
    zeros = weight.scale if weight.offset is None else weight.offset.view(torch.bfloat16)
    grouped_few_kernel[(cdiv(rows // 16, form.groups * form.units), form.split_k)](
        x, weight.codes.view(torch.int32), weight.scale, zeros, x if residual is None else residual,
        norm_weight, out, x if total is None else total, eps, rows,
        columns, columns // form.split_k, weight.group, form.warps, form.groups, form.units,
        form.chunks, form.depth, 0 if total is None else x.shape[0], gated,
        has_zeros, norm is not None, residual is not None and total is None, form.trigger,
        num_warps=form.warps, maxnreg=form.registers if has_zeros else None, launch_pdl=True,
    )  # fmt: skip
    return out


def grouped_few_fits(form: Warps, x: torch.Tensor, weight: LaidOut, *, gated: bool) -> bool:
    """Return whether the kernel supports these: see `LaidOut.is_read_in_units`; shapes divide."""
    rows, columns = weight.num_rows, weight.num_columns
    step = 128 * form.split_k * form.warps * form.chunks
    steps = columns // step
    return (
        x.shape[0] == 1
        and weight.is_read_in_units(x)
        and rows % 64 == 0  # so rows have no padding, whose scales would be elsewhere
        and (not gated or (form.units == 2 and rows % (32 * form.groups) == 0))
        and columns % step == 0
        and steps * form.groups % form.depth == 0
        and (steps % form.depth == 0 or form.depth % steps == 0)
    )
