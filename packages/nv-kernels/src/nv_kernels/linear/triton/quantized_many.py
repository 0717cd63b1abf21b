"""17 to 1,000 tokens times a weight of 4 bits on Hopper: one warp loads, groups of warps multiply.

A warp of its own keeps STAGES chunks of x in flight. Two or three groups of four warps share them;
each has 64 rows of the weight, whose codes go from memory to registers, are dequantized there as
`Grouped.dense` rounds them, and are wgmma's left operand. While one group unpacks, the others
multiply: wgmma may not run while its own group's operands are written.

Written in Gluon, which is experimental: import this module only with `gluon_module`. `tuned`
decides when to use it.
"""

# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nv_kernels.launch.descriptors import describe
from nv_kernels.launch.sizes import cdiv
from nv_kernels.launch.triton_previous_gluon import let_next_start, wait_for_previous
from nv_kernels.linear.quantized.tuned import LOADING
from nv_kernels.linear.triton.quantized_layout import UNPACK_LESS_ZERO
from nv_kernels.linear.triton.quantized_slab import depth, left_operand
from nv_kernels.linear.triton.result import empty_result

if TYPE_CHECKING:
    from nv_kernels.linear.quantized.tuned import Groups
    from nv_kernels.linear.triton.quantized_layout import LaidOut

CHUNK = gl.constexpr(128)  # columns of a chunk
LOADS = gl.constexpr(LOADING)
UNIT = gl.constexpr(256)  # words of 16 rows by 128 columns: a warp's share of a chunk
# $7 and $8 are the scales of the two rows.
UNPACK = gl.constexpr(UNPACK_LESS_ZERO + """
    mul.rn.bf16x2 $0, $0, $7;
    mul.rn.bf16x2 $1, $1, $8;
    mul.rn.bf16x2 $2, $2, $7;
    mul.rn.bf16x2 $3, $3, $8;
}""")  # fmt: skip
# A scale of more bits is the sum of $7 and $9, or $8 and $10.
UNPACK_SUM = gl.constexpr(UNPACK_LESS_ZERO + """
    .reg .b32 rest;
    mul.rn.bf16x2 rest, $0, $9;
    fma.rn.bf16x2 $0, $0, $7, rest;
    mul.rn.bf16x2 rest, $1, $10;
    fma.rn.bf16x2 $1, $1, $8, rest;
    mul.rn.bf16x2 rest, $2, $9;
    fma.rn.bf16x2 $2, $2, $7, rest;
    mul.rn.bf16x2 rest, $3, $10;
    fma.rn.bf16x2 $3, $3, $8, rest;
}""")  # fmt: skip


@gluon.jit
def _twice(bits):
    """16 bits in both halves of a word."""
    return (bits.to(gl.uint32) * 0x10001).to(gl.int32, bitcast=True)


@gluon.jit
def _parts(scale):
    """Return a scale as the sum of two bf16, each in both halves of a word."""
    value = scale.to(gl.float32)
    main = value.to(gl.bfloat16)
    rest = (value - main.to(gl.float32)).to(gl.bfloat16)
    return _twice(main.to(gl.uint16, bitcast=True)), _twice(rest.to(gl.uint16, bitcast=True))


@gluon.jit
def _dequantize(words, upper, lower, upper_zero, lower_zero, operand: gl.constexpr):
    """Codes as loaded -> values of columns 0 to 63 and 64 to 127 of [64, 128] in bf16."""
    if upper.dtype == gl.bfloat16:
        upper_scale = _twice(upper.to(gl.uint16, bitcast=True))
        lower_scale = _twice(lower.to(gl.uint16, bitcast=True))
        a, b, c, d = gl.inline_asm_elementwise(
            UNPACK, "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, upper_zero, lower_zero, upper_scale, lower_scale],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        upper_scale, upper_rest = _parts(upper)
        lower_scale, lower_rest = _parts(lower)
        a, b, c, d = gl.inline_asm_elementwise(
            UNPACK_SUM, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r",
            [words, upper_zero, lower_zero, upper_scale, lower_scale, upper_rest, lower_rest],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return left_operand(a, b, operand), left_operand(c, d, operand)


@gluon.jit
def _load_x(
    x_desc, ring, full, empty, token, first, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
    TRIGGER: gl.constexpr,
):  # fmt: skip
    """Load the chunks of x in order, when the previous kernel has written it."""
    if TRIGGER > 0:
        wait_for_previous()
        if TRIGGER == 2:
            let_next_start()
    for chunk in range(CHUNKS):
        stage = chunk % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), ((chunk // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, x_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            x_desc, [first // 64 + chunk * 2, token, 0], bar, ring.index(stage)
        )
    if TRIGGER == 3:
        let_next_start()


@gluon.jit
def _multiply(
    which: gl.constexpr, codes, scale, zeros, out, ring, squares, full, empty, turns, tile, token,
    part, M, N,
    K: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr,
    ROWS: gl.constexpr, GATED: gl.constexpr, ZEROS: gl.constexpr, DEPTH: gl.constexpr,
    TURNS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply a group's 64 rows: 32 gate and 32 up rows where gated."""
    CHUNKS: gl.constexpr = COLUMNS // CHUNK
    first = part * COLUMNS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    loads: gl.constexpr = gl.BlockedLayout([1, 2, 1, 4], [1, 1, 32, 1], [4, 1, 1, 1], [3, 2, 1, 0])
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, loads))))
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, loads))))
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, loads))))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, loads))))
    if GATED:
        row = tile * (ROWS // 2) + which * 32
        unit = row // 16 + warp % 2 + warp // 2 * (N // 32)
    else:
        row = tile * ROWS + which * 64
        unit = row // 16 + warp
    start = unit.to(gl.int64) * (K // CHUNK * UNIT) + first // CHUNK * UNIT
    inside = half[None, :, None, None] * 128 + lane[None, None, :, None] * 4
    inside = inside + word[None, None, None, :]
    codes_at = codes + start[:, None, None, None] + inside
    rows_at = unit[:, None, None, None] * 16 + lane[None, None, :, None] // 4
    scale_at = scale + rows_at
    zeros_at = zeros + rows_at
    words = ()
    uppers = ()
    lowers = ()
    upper_zeros = ()
    lower_zeros = ()
    for early in gl.static_range(DEPTH):
        early_at = (first + early * CHUNK) // GROUP * N
        words = words + (gl.load(codes_at + early * UNIT),)
        uppers = uppers + (gl.load(scale_at + early_at),)
        lowers = lowers + (gl.load(scale_at + early_at + 8),)
        if ZEROS:
            upper_zeros = upper_zeros + (gl.load(zeros_at + early_at),)
            lower_zeros = lower_zeros + (gl.load(zeros_at + early_at + 8),)
    sums = gl.zeros([64, BLOCK_M], gl.float32, layout)
    eight = gl.full([4, 1, 32, 1], 0x43084308, gl.int32, loads)  # 136: zero is 8
    for step in range(CHUNKS // DEPTH):
        next_words = ()
        next_uppers = ()
        next_lowers = ()
        next_upper_zeros = ()
        next_lower_zeros = ()
        for ahead in gl.static_range(DEPTH):
            now = step * DEPTH + ahead
            upper_zero = _twice(upper_zeros[ahead]) if ZEROS else eight
            lower_zero = _twice(lower_zeros[ahead]) if ZEROS else eight
            low, high = _dequantize(
                words[ahead], uppers[ahead], lowers[ahead], upper_zero, lower_zero, operand
            )
            # Loads past the last chunk read it again.
            later = gl.minimum(now + DEPTH, CHUNKS - 1)
            at = (first + later * CHUNK) // GROUP * N
            next_words = next_words + (gl.load(codes_at + later * UNIT),)
            next_uppers = next_uppers + (gl.load(scale_at + at),)
            next_lowers = next_lowers + (gl.load(scale_at + at + 8),)
            if ZEROS:
                next_upper_zeros = next_upper_zeros + (gl.load(zeros_at + at),)
                next_lower_zeros = next_lower_zeros + (gl.load(zeros_at + at + 8),)
            stage = now % STAGES
            mbarrier.wait(full.index(stage), (now // STAGES) & 1)
            x = ring.index(stage).reshape([2 * BLOCK_M, 64])
            if TURNS:
                mbarrier.wait(turns.index(which), (now & 1) ^ (1 if which == 0 else 0))
            started = warpgroup_mma(low, x.slice(0, BLOCK_M).permute((1, 0)), sums, is_async=True)
            started = warpgroup_mma(
                high, x.slice(BLOCK_M, BLOCK_M).permute((1, 0)), started, is_async=True
            )
            if TURNS:
                sums, low, high = warpgroup_mma_wait(num_outstanding=1, deps=(started, low, high))
                gl.thread_barrier()
                mbarrier.arrive(turns.index((which + 1) % GROUPS), count=1)
                sums, low, high = warpgroup_mma_wait(num_outstanding=0, deps=(sums, low, high))
            else:
                sums, low, high = warpgroup_mma_wait(num_outstanding=0, deps=(started, low, high))
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
        words = next_words
        uppers = next_uppers
        lowers = next_lowers
        upper_zeros = next_upper_zeros
        lower_zeros = next_lower_zeros
    if GATED:
        square = squares.index(which)
        spread: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [1, 4], [0, 1])
        feature = row + gl.arange(0, 32, gl.SliceLayout(1, spread))
        WIDTH: gl.constexpr = min(BLOCK_M, 64)
        PIECES: gl.constexpr = BLOCK_M // WIDTH
        if PIECES == 2:
            pieces = gl.split(sums.reshape([64, 2, 64]).permute((0, 2, 1)))
        else:
            pieces = (sums,)
        for piece in gl.static_range(PIECES):
            gl.thread_barrier()
            square.store(pieces[piece])
            gl.thread_barrier()
            gate = square.slice(0, 32, 0).load(spread)
            up = square.slice(32, 32, 0).load(spread)
            y = gate / (1.0 + gl.exp(-gate)) * up
            member = token + piece * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, spread))
            place = member[None, :] * (N // 2) + feature[:, None]
            gl.store(out + place, y.to(out.dtype.element_ty), mask=(member < M)[None, :])
    else:
        output = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
        member = token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
        place = (part * M + member[None, :]) * N + output[:, None]
        gl.store(out + place, sums.to(out.dtype.element_ty), mask=(member < M)[None, :])


@gluon.jit(do_not_specialize=["M"])
def grouped_many_kernel(
    x_desc, codes, scale, zeros, out, M, N,
    K: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr,
    GROUPS: gl.constexpr, GATED: gl.constexpr, ZEROS: gl.constexpr, DEPTH: gl.constexpr,
    TURNS: gl.constexpr, STAGES: gl.constexpr, TRIGGER: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute [BLOCK_M, 64 GROUPS] outputs over COLUMNS columns; GATED: half of them gate rows.

    x_desc describes x as [K / 64, M, 64] in boxes of [2, BLOCK_M, 64]; codes int32
    [N / 16, K / 128, 256] as `quantized_layout` has them; scale and zeros (128 + zero in bf16, as
    16 bits) [G, N]. DEPTH divides the number of chunks. 4 warps, and those of the other groups.
    """
    if TRIGGER == 1:
        let_next_start()
    ROWS: gl.constexpr = 64 * GROUPS
    tile = gl.program_id(1)
    token = gl.program_id(0) * BLOCK_M
    part = gl.program_id(2)
    ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + x_desc.block_shape, x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if GATED:
        squares = gl.allocate_shared_memory(
            gl.float32, [GROUPS, 64, min(BLOCK_M, 64)], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
    else:
        squares = full  # not used
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(GROUPS):
        mbarrier.init(turns.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    given = (codes, scale, zeros, out, ring, squares, full, empty, turns, tile, token, part, M, N)
    sizes: gl.constexpr = (
        K, COLUMNS, GROUP, BLOCK_M, ROWS, GATED, ZEROS, DEPTH, TURNS, GROUPS, STAGES,
    )  # fmt: skip
    loaded = (x_desc, ring, full, empty, token, part * COLUMNS)
    counts: gl.constexpr = (COLUMNS // CHUNK, STAGES, TRIGGER)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_multiply, (0,) + given + sizes),
                (_multiply, (1,) + given + sizes),
                (_multiply, (2,) + given + sizes),
                (_load_x, loaded + counts),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0,) + given + sizes),
                (_multiply, (1,) + given + sizes),
                (_load_x, loaded + counts),
            ],
            [4, 1],
            [REGISTERS, LOADS],
        )


def grouped_many(
    form: Groups,
    x: torch.Tensor,
    weight: LaidOut,
    *,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply tokens by a weight of 4 bits; `grouped_many_fits` must hold.

    Args:
        form: the settings.
        x: [T, K] bf16, columns in the codes' order.
        weight: [N, K], or [2F, K] (gate rows, then up rows) where gated.
        gated: return silu(gate) * up, [T, F]; split_k is 1.
        dtype: of the result, x's by default; partials are fp32.

    Returns:
        [T, N] or [T, F]; [P, T, N] partials if the form splits K.
    """
    tokens, columns = x.shape
    rows = weight.num_rows
    outputs = rows // 2 if gated else rows
    out = empty_result(form.split_k, tokens, outputs, dtype or x.dtype, x.device)
    halves = x.view(tokens, columns // 64, 64).transpose(0, 1)
    share = columns // form.split_k
    zeros = weight.scale if weight.offset is None else weight.offset.view(torch.uint16)
    grid = (cdiv(tokens, form.block_m), rows // (64 * form.groups), form.split_k)
    grouped_many_kernel[grid](
        describe(halves, [2, form.block_m, 64]), weight.codes.view(torch.int32), weight.scale,
        zeros, out, tokens, rows,
        columns, share, weight.group, form.block_m, form.groups, gated, weight.offset is not None,
        depth(form.depth, share), form.turns, form.stages, form.trigger, form.group_registers,
        num_warps=4, maxnreg=form.registers, launch_pdl=True,
    )  # fmt: skip
    return out


def grouped_many_fits(form: Groups, x: torch.Tensor, weight: LaidOut, *, gated: bool) -> bool:
    """Return whether the kernel supports these: see `LaidOut.is_read_in_units`; shapes divide."""
    rows, columns = weight.num_rows, weight.num_columns
    return (
        weight.is_read_in_units(x)
        and rows % (64 * form.groups * (2 if gated else 1)) == 0
        and columns % (128 * form.split_k) == 0
    )
