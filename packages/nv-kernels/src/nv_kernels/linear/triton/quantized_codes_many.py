"""Tokens in codes of 8 bits times a weight on Hopper: one warp loads, groups of warps multiply.

A warp of its own keeps STAGES chunks of the weight and of x in flight, the weight's first ones
before it waits for the kernel that writes x. Two or three groups of four warps share a chunk's
tokens; each has 64 rows of the weight, on wgmma's 64-row side. Sums of e4m3 products, which Hopper
adds in about 14 bits, are added in fp32 after each chunk of 128 columns, while the other groups
multiply.

Written in Gluon, which is experimental: import this module only with `gluon_module`. `tuned`
decides when to use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from nv_kernels.linear.triton.result import empty_result

if TYPE_CHECKING:
    import torch

    from nv_kernels.linear.quantized.tuned import Groups

CHUNK = gl.constexpr(128)  # columns of a chunk
LOADS = gl.constexpr(LOADING)


@gluon.jit
def _load(
    x_desc, w_desc, x_ring, w_ring, full, empty, row, token, first,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, TRIGGER: gl.constexpr,
):  # fmt: skip
    """Load the chunks in order."""
    num_bytes: gl.constexpr = x_desc.block_type.nbytes + GROUPS * w_desc.block_type.nbytes
    STEP: gl.constexpr = w_desc.block_shape[1]
    EARLY: gl.constexpr = min(STAGES, CHUNKS)
    for chunk in range(EARLY):
        bar = full.index(chunk)
        mbarrier.expect(bar, num_bytes)
        for which in gl.static_range(GROUPS):
            tma.async_copy_global_to_shared(
                w_desc, [0, row + which * STEP, first + chunk * CHUNK], bar,
                w_ring.index(chunk * GROUPS + which),
            )  # fmt: skip
    if TRIGGER > 0:
        wait_for_previous()
        if TRIGGER == 2:
            let_next_start()
    for chunk in range(CHUNKS):
        stage = chunk % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), ((chunk // STAGES) & 1) ^ 1)
        late = chunk >= EARLY
        mbarrier.expect(bar, num_bytes, pred=late)
        tma.async_copy_global_to_shared(
            x_desc, [0, token, first + chunk * CHUNK], bar, x_ring.index(stage)
        )
        for which in gl.static_range(GROUPS):
            tma.async_copy_global_to_shared(
                w_desc, [0, row + which * STEP, first + chunk * CHUNK], bar,
                w_ring.index(stage * GROUPS + which), pred=late,
            )  # fmt: skip
    if TRIGGER == 3:
        let_next_start()


@gluon.jit
def _multiply(
    which: gl.constexpr, x_scale, w_scale, out, x_ring, w_ring, squares, x_scales, full, empty,
    row, token, part, M, N,
    K: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_M: gl.constexpr, GROUPS: gl.constexpr,
    GATED: gl.constexpr, X_GROUPS: gl.constexpr, W_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    TRIGGER: gl.constexpr,
):  # fmt: skip
    """Multiply a group's 64 rows: 32 gate and 32 up rows where gated."""
    CHUNKS: gl.constexpr = COLUMNS // CHUNK
    TALL: gl.constexpr = x_scales.shape[1]
    IS_INT: gl.constexpr = w_ring.dtype == gl.int8
    SCALED: gl.constexpr = X_GROUPS > 1 or W_BLOCKS
    KEPT: gl.constexpr = gl.int32 if IS_INT else gl.float32
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 32]
    )
    at = gl.arange(0, 64, gl.SliceLayout(1, layout))
    if GATED:
        rows = row + which * 32 + at % 32 + at // 32 * (N // 2)
    else:
        rows = row + which * 64 + at
    members = token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    block = part * CHUNKS
    if W_BLOCKS:
        w_scale_at = w_scale + rows // 128 * (K // 128) + block
    else:
        w_scale_at = w_scale + rows
    row_scale = gl.load(w_scale_at)
    if TRIGGER > 0:
        wait_for_previous()
    x_scale_at = x_scale + members % M
    if X_GROUPS == 1:
        token_scale = gl.load(x_scale_at)
    else:  # each group writes the same numbers, and reads what it wrote itself
        tall: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        each = gl.arange(0, TALL, gl.SliceLayout(1, tall))
        spread_members = token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, tall))
        from_scales = x_scale + (block + each)[:, None] * M + (spread_members % M)[None, :]
        for piece in gl.static_range(CHUNKS // TALL):
            x_scales.index(piece).store(gl.load(from_scales + piece * TALL * M))
        gl.thread_barrier()
        by_chunk = x_scales._reinterpret(
            gl.float32, [CHUNKS, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
    sums = gl.zeros([64, BLOCK_M], KEPT, layout)
    none = gl.zeros([64, BLOCK_M], KEPT, layout)
    for chunk in range(CHUNKS):
        stage = chunk % STAGES
        mbarrier.wait(full.index(stage), (chunk // STAGES) & 1)
        w = w_ring.index(stage * GROUPS + which).reshape([64, CHUNK])
        x = x_ring.index(stage).reshape([BLOCK_M, CHUNK]).permute((1, 0))
        if IS_INT:
            started = warpgroup_mma(w, x, sums, is_async=True)
            sums = warpgroup_mma_wait(num_outstanding=0, deps=(started,))
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
        else:
            started = warpgroup_mma(w, x, none, use_acc=False, is_async=True)
            if W_BLOCKS:
                row_scale = gl.load(w_scale_at + chunk)
            if X_GROUPS > 1:
                token_scale = by_chunk.index(chunk).load(gl.SliceLayout(0, layout))
            product = warpgroup_mma_wait(num_outstanding=0, deps=(started,))
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            if SCALED:
                sums += product * row_scale[:, None] * token_scale[None, :]
            else:
                sums += product
    total = sums.to(gl.float32)
    if not SCALED:
        total = total * row_scale[:, None] * token_scale[None, :]
    if GATED:
        square = squares.index(which)
        spread: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [1, 4], [0, 1])
        feature = row + which * 32 + gl.arange(0, 32, gl.SliceLayout(1, spread))
        WIDTH: gl.constexpr = min(BLOCK_M, 64)
        PIECES: gl.constexpr = BLOCK_M // WIDTH
        if PIECES == 2:
            pieces = gl.split(total.reshape([64, 2, 64]).permute((0, 2, 1)))
        else:
            pieces = (total,)
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
        place = (part * M + members[None, :]) * N + rows[:, None]
        gl.store(out + place, total.to(out.dtype.element_ty), mask=(members < M)[None, :])


@gluon.jit(do_not_specialize=["M"])
def codes_many_kernel(
    x_desc, w_desc, x_scale, w_scale, out, M, N,
    K: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_M: gl.constexpr, GROUPS: gl.constexpr,
    GATED: gl.constexpr, X_GROUPS: gl.constexpr, W_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    TRIGGER: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute [BLOCK_M, 64 GROUPS] outputs over COLUMNS columns; GATED: half of them gate rows.

    x_desc describes x as [1, M, K] in boxes of [1, BLOCK_M, 128], w_desc the weight as [1, N, K],
    or as [2, N / 2, K] if GATED, in boxes of 64 rows. x_scale [X_GROUPS, M]; w_scale [N], or
    of blocks if W_BLOCKS. 4 warps, and those of the other groups.
    """
    if TRIGGER == 1:
        let_next_start()
    ROWS: gl.constexpr = 64 * GROUPS
    row = gl.program_id(1) * (ROWS // 2 if GATED else ROWS)
    token = gl.program_id(0) * BLOCK_M
    part = gl.program_id(2)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_shape, x_desc.layout)
    w_ring = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES * GROUPS] + w_desc.block_shape, w_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if GATED:
        squares = gl.allocate_shared_memory(
            gl.float32, [GROUPS, 64, min(BLOCK_M, 64)], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
    else:
        squares = full  # not used
    CHUNKS: gl.constexpr = COLUMNS // CHUNK
    if X_GROUPS > 1:
        TALL: gl.constexpr = 8 if CHUNKS % 8 == 0 else CHUNKS & -CHUNKS
        x_scales = gl.allocate_shared_memory(
            gl.float32, [CHUNKS // TALL, TALL, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
    else:
        x_scales = full  # not used
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    given = (
        x_scale, w_scale, out, x_ring, w_ring, squares, x_scales, full, empty, row, token, part, M,
        N,
    )  # fmt: skip
    sizes: gl.constexpr = (
        K, COLUMNS, BLOCK_M, GROUPS, GATED, X_GROUPS, W_BLOCKS, STAGES, TRIGGER,
    )  # fmt: skip
    loaded = (x_desc, w_desc, x_ring, w_ring, full, empty, row, token, part * COLUMNS)
    counts: gl.constexpr = (CHUNKS, GROUPS, STAGES, TRIGGER)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_multiply, (0,) + given + sizes),
                (_multiply, (1,) + given + sizes),
                (_multiply, (2,) + given + sizes),
                (_load, loaded + counts),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0,) + given + sizes),
                (_multiply, (1,) + given + sizes),
                (_load, loaded + counts),
            ],
            [4, 1],
            [REGISTERS, LOADS],
        )


def codes_many(
    form: Groups,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    dtype: torch.dtype,
    gated: bool = False,
) -> torch.Tensor:
    """Multiply codes of tokens by codes of a weight; `codes_many_fits` must hold.

    Args:
        form: the settings.
        x: [T, K] e4m3 or int8.
        x_scale: fp32 [T, 1], or [T, K / 128] of blocks, tokens side by side.
        weight: [N, K] in x's dtype, or [2F, K] (gate rows, then up rows) where gated.
        w_scale: fp32 [N], or [ceil(N / 128), K / 128] of blocks.
        dtype: of the result; partials are fp32.
        gated: return silu(gate) * up, [T, F]; split_k is 1.

    Returns:
        [T, N] or [T, F]; [P, T, N] partials if the form splits K.
    """
    (tokens, columns), rows = x.shape, weight.shape[0]
    halves = 2 if gated else 1
    out = empty_result(form.split_k, tokens, rows // halves, dtype, x.device)
    grid = (cdiv(tokens, form.block_m), rows // (64 * form.groups), form.split_k)
    codes_many_kernel[grid](
        describe(x[None], [1, form.block_m, 128]),
        describe(weight.view(halves, -1, columns), [halves, 64 // halves, 128]),
        x_scale, w_scale, out, tokens, rows,
        columns, columns // form.split_k, form.block_m, form.groups, gated, x_scale.shape[1],
        w_scale.dim() == 2, form.stages, form.trigger, form.group_registers,
        num_warps=4, maxnreg=form.registers, launch_pdl=True,
    )  # fmt: skip
    return out


def codes_many_fits(form: Groups, x: torch.Tensor, weight: torch.Tensor, *, gated: bool) -> bool:
    """Return whether the kernel supports these tensors: shapes that divide, aligned addresses."""
    rows, columns = weight.shape
    return (
        x.shape[0] > 0
        and rows % (64 * form.groups * (2 if gated else 1)) == 0
        and columns % (128 * form.split_k) == 0
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (x, weight))
    )
