"""1 to 64 tokens times a weight of 4 bits on Hopper, whose codes go from memory to registers.

Written in Gluon, whose layouts can be chosen: codes lie in memory in the order in which a warp's
threads hold wgmma's left operand, so they never pass through shared memory. A program loads the
codes of its first chunks before it waits for the kernel that writes x, and keeps DEPTH chunks of
128 columns in flight. Each chunk's product is scaled in fp32 and added.

`tuned` decides when to use it. Gluon is experimental: import this module only with `gluon_module`.
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
from nv_kernels.linear.triton.quantized_layout import UNPACK_LESS_ZERO
from nv_kernels.linear.triton.result import empty_result

if TYPE_CHECKING:
    from nv_kernels.linear.quantized.tuned import Ring
    from nv_kernels.linear.triton.quantized_layout import LaidOut

CHUNK = gl.constexpr(128)  # columns of a chunk
UNIT = gl.constexpr(256)  # words of 16 rows by 128 columns: a warp's share of a chunk
UNPACK = gl.constexpr(UNPACK_LESS_ZERO + "}")


@gluon.jit
def left_operand(upper, lower, operand: gl.constexpr):
    """Pairs of columns of rows r and of rows r + 8, [4, 2, 32, 4] -> bf16 [64, 64]."""
    first = gl.join((upper & 0xFFFF).to(gl.int16), (lower & 0xFFFF).to(gl.int16))
    second = gl.join((upper >> 16).to(gl.int16), (lower >> 16).to(gl.int16))
    values = gl.join(first, second).to(gl.bfloat16, bitcast=True)
    # warp, half, row, pair, column 16, column 8, row 8, column
    values = values.reshape([4, 2, 8, 4, 2, 2, 2, 2]).permute((0, 6, 2, 1, 4, 5, 3, 7))
    return gl.convert_layout(values.reshape([64, 64]), operand, assert_trivial=True)


@gluon.jit
def _unpack(words, upper_zero, lower_zero, operand: gl.constexpr):
    """Codes as loaded -> columns 0 to 63 and 64 to 127 of [64, 128], less zero."""
    low_upper, low_lower, high_upper, high_lower = gl.inline_asm_elementwise(
        UNPACK, "=&r,=&r,=&r,=&r,r,r,r", [words, upper_zero, lower_zero],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return left_operand(low_upper, low_lower, operand), left_operand(
        high_upper, high_lower, operand
    )


@gluon.jit
def _start_x(x_desc, x_tiles, ready, token, first, chunk, STAGES: gl.constexpr):
    bar = ready.index(chunk % STAGES)
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    at = (first + chunk * CHUNK) // 64
    tma.async_copy_global_to_shared(x_desc, [at, token, 0], bar, x_tiles.index(chunk % STAGES))


@gluon.jit
def _twice(zeros_at):
    """Load 128 + zero, bf16 as 16 bits, into both halves of a word."""
    return (gl.load(zeros_at).to(gl.uint32) * 0x10001).to(gl.int32, bitcast=True)


@gluon.jit(do_not_specialize=["M"])
def grouped_slab_kernel(
    x_desc, codes, scale, zeros, out, M, N,
    K: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr,
    GATED: gl.constexpr, ZEROS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    TRIGGER: gl.constexpr,
):  # fmt: skip
    """Compute [BLOCK_M, 64] outputs over COLUMNS columns; GATED: 32 gate and 32 up rows.

    x_desc describes x as [K / 64, M, 64] in boxes of [2, BLOCK_M, 64]; codes int32
    [N / 16, K / 128, 256] as `quantized_layout` has them; scale and zeros (128 + zero in bf16, as
    16 bits) [G, N]. DEPTH divides the number of chunks.
    """
    CHUNKS: gl.constexpr = COLUMNS // CHUNK
    if TRIGGER == 1:
        let_next_start()
    tile = gl.program_id(0)
    token = gl.program_id(1) * BLOCK_M
    first = gl.program_id(2) * COLUMNS
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
        unit = tile * 2 + warp % 2 + warp // 2 * (N // 32)
    else:
        unit = tile * 4 + warp
    start = unit.to(gl.int64) * (K // CHUNK * UNIT) + first // CHUNK * UNIT
    inside = half[None, :, None, None] * 128 + lane[None, None, :, None] * 4
    inside = inside + word[None, None, None, :]
    codes_at = codes + start[:, None, None, None] + inside
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    if GATED:
        row = tile * 32 + row % 32 + row // 32 * (N // 2)
    else:
        row = tile * 64 + row
    scale_at = scale + row
    zeros_at = zeros + unit[:, None, None, None] * 16 + lane[None, None, :, None] // 4
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2, BLOCK_M, 64], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
    fence_async_shared()
    words = ()
    scales = ()
    uppers = ()
    lowers = ()
    for chunk in gl.static_range(DEPTH):
        group = (first + chunk * CHUNK) // GROUP * N
        words = words + (gl.load(codes_at + chunk * UNIT),)
        scales = scales + (gl.load(scale_at + group),)
        if ZEROS:
            uppers = uppers + (_twice(zeros_at + group),)
            lowers = lowers + (_twice(zeros_at + group + 8),)
    if TRIGGER > 0:
        wait_for_previous()
        if TRIGGER == 2:
            let_next_start()
    for chunk in gl.static_range(STAGES):
        _start_x(x_desc, x_tiles, ready, token, first, chunk, STAGES)
    sums = gl.zeros([64, BLOCK_M], gl.float32, layout)
    none = gl.zeros([64, BLOCK_M], gl.float32, layout)
    eight = gl.full([4, 1, 32, 1], 0x43084308, gl.int32, loads)  # 136: zero is 8
    for step in range(CHUNKS // DEPTH):
        next_words = ()
        next_scales = ()
        next_uppers = ()
        next_lowers = ()
        for ahead in gl.static_range(DEPTH):
            now = step * DEPTH + ahead
            upper = uppers[ahead] if ZEROS else eight
            lower = lowers[ahead] if ZEROS else eight
            low, high = _unpack(words[ahead], upper, lower, operand)
            place = now % STAGES
            mbarrier.wait(ready.index(place), (now // STAGES) & 1)
            x = x_tiles.index(place).reshape([2 * BLOCK_M, 64])
            part = warpgroup_mma(
                low, x.slice(0, BLOCK_M).permute((1, 0)), none, use_acc=False, is_async=True
            )
            part = warpgroup_mma(
                high, x.slice(BLOCK_M, BLOCK_M).permute((1, 0)), part, is_async=True
            )
            # Loads past the last chunk read it again.
            later = gl.minimum(now + DEPTH, CHUNKS - 1)
            at = (first + later * CHUNK) // GROUP * N
            next_words = next_words + (gl.load(codes_at + later * UNIT),)
            next_scales = next_scales + (gl.load(scale_at + at),)
            if ZEROS:
                next_uppers = next_uppers + (_twice(zeros_at + at),)
                next_lowers = next_lowers + (_twice(zeros_at + at + 8),)
            product = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
            sums += product * scales[ahead].to(gl.float32)[:, None]
            if now + STAGES < CHUNKS:
                gl.thread_barrier()
                _start_x(x_desc, x_tiles, ready, token, first, now + STAGES, STAGES)
        words = next_words
        scales = next_scales
        uppers = next_uppers
        lowers = next_lowers
    if TRIGGER == 3:
        let_next_start()
    if GATED:
        square = gl.allocate_shared_memory(
            gl.float32, [64, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
        square.store(sums)
        gl.thread_barrier()
        spread: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [1, 4], [0, 1])
        gate = square.slice(0, 32, 0).load(spread)
        up = square.slice(32, 32, 0).load(spread)
        y = gate / (1.0 + gl.exp(-gate)) * up
        feature = gl.arange(0, 32, gl.SliceLayout(1, spread))
        member = token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, spread))
        place = member[None, :] * (N // 2) + tile * 32 + feature[:, None]
        gl.store(out + place, y.to(out.dtype.element_ty), mask=(member < M)[None, :])
    else:
        whole: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
        y = gl.convert_layout(sums, whole)
        output = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, whole))
        member = token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, whole))
        place = (gl.program_id(2) * M + member[None, :]) * N + output[:, None]
        gl.store(out + place, y.to(out.dtype.element_ty), mask=(member < M)[None, :])


def grouped_slab(
    form: Ring,
    x: torch.Tensor,
    weight: LaidOut,
    *,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply tokens by a weight of 4 bits; `grouped_slab_fits` must hold.

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
    zeros = weight.scale if weight.offset is None else weight.offset
    grid = (rows // 64, cdiv(tokens, form.block_m), form.split_k)
    grouped_slab_kernel[grid](
        describe(halves, [2, form.block_m, 64]), weight.codes.view(torch.int32), weight.scale,
        zeros.view(torch.uint16) if weight.offset is not None else zeros, out, tokens, rows,
        columns, share, weight.group, form.block_m, gated, weight.offset is not None,
        depth(form.depth, share), min(form.stages, share // 128), form.trigger,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out


def depth(most: int, share: int) -> int:
    """Count the chunks in registers at once: it divides the number of chunks."""
    return next(n for n in range(most, 0, -1) if share // 128 % n == 0)


def grouped_slab_fits(form: Ring, x: torch.Tensor, weight: LaidOut, *, gated: bool) -> bool:
    """Return whether the kernel supports these: see `LaidOut.is_read_in_units`; shapes divide."""
    rows, columns = weight.num_rows, weight.num_columns
    return (
        weight.is_read_in_units(x)
        and rows % (128 if gated else 64) == 0
        and columns % (128 * form.split_k) == 0
    )
