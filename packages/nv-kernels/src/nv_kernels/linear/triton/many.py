"""17 to 256 tokens times a weight of a large layer on Hopper: groups of warps share the tokens.

A warp of its own keeps STAGES chunks of the weight and of x in flight, the weight's first ones
before it waits for the kernel that writes x. Two or three groups of four warps multiply a chunk's
tokens; each has 64 rows of the weight, on wgmma's 64-row side. So a program's tile holds most or
all of a step's tokens, and one wave of programs covers the card.

Gate and up rows lie eight by eight in turn in shared memory. Then a thread has the gate and the up
of the same feature, and gates in registers. A group puts results of 16 bits into its own part of
the weight's ring, which is free by then. Bulk copies bring them to memory.

Written in Gluon, which is experimental: import this module only with `gluon_module`. `tuned`
decides when to use it.
"""

# mypy: disable-error-code="assignment"

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

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from nv_kernels.linear.tuned import Many

CHUNK = gl.constexpr(64)  # columns of a chunk
LOADS = gl.constexpr(32)  # registers per thread of the warp that loads


@gluon.jit
def _start_weights(
    w_desc, w_ring, bar, row, column, stage, is_started,
    GROUPS: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start one chunk's rows of every group, unless they are started already."""
    for which in gl.static_range(GROUPS):
        slot = w_ring.index(which * STAGES + stage)
        if GATED:
            place = [row // 8 + which * 4, 0, 0, column]
        else:
            place = [row + which * 64, column]
        tma.async_copy_global_to_shared(w_desc, place, bar, slot, pred=is_started == 0)


@gluon.jit
def _load(
    x_desc, w_desc, x_ring, w_ring, full, empty, row, token, first,
    CHUNKS: gl.constexpr, PIECES: gl.constexpr, GROUPS: gl.constexpr, GATED: gl.constexpr,
    STAGES: gl.constexpr, TRIGGER: gl.constexpr,
):  # fmt: skip
    """Load the chunks in order."""
    PIECE: gl.constexpr = x_desc.block_shape[0]
    num_bytes: gl.constexpr = PIECES * x_desc.block_type.nbytes + GROUPS * w_desc.block_type.nbytes
    EARLY: gl.constexpr = min(STAGES, CHUNKS)
    for chunk in range(EARLY):
        bar = full.index(chunk)
        mbarrier.expect(bar, num_bytes)
        column = first + chunk * CHUNK
        _start_weights(w_desc, w_ring, bar, row, column, chunk, 0, GROUPS, GATED, STAGES)
    if TRIGGER > 0:
        wait_for_previous()
        if TRIGGER == 2:
            let_next_start()
    for chunk in range(CHUNKS):
        stage = chunk % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), ((chunk // STAGES) & 1) ^ 1)
        is_early = (chunk < EARLY).to(gl.int32)
        column = first + chunk * CHUNK
        mbarrier.expect(bar, num_bytes, pred=is_early == 0)
        for piece in gl.static_range(PIECES):
            slot = x_ring.index(stage * PIECES + piece)
            tma.async_copy_global_to_shared(x_desc, [token + piece * PIECE, column], bar, slot)
        _start_weights(w_desc, w_ring, bar, row, column, stage, is_early, GROUPS, GATED, STAGES)
    if TRIGGER == 3:
        let_next_start()


@gluon.jit
def _start_products(w, x_ring, stage, sums, PIECES: gl.constexpr):
    """Start the products of one chunk, one per piece of the tokens."""
    started = ()
    for piece in gl.static_range(PIECES):
        x = x_ring.index(stage * PIECES + piece).permute((1, 0))
        started = started + (warpgroup_mma(w, x, sums[piece], is_async=True),)
    return started


@gluon.jit
def _wait(started, num_outstanding: gl.constexpr):
    """Wait for products; always return a tuple."""
    if len(started) == 1:
        return (warpgroup_mma_wait(num_outstanding=num_outstanding, deps=started),)
    else:
        return warpgroup_mma_wait(num_outstanding=num_outstanding, deps=started)


@gluon.jit
def _multiply(
    which: gl.constexpr, out, out_desc, x_ring, w_ring, full, empty, row, token, part, M, N,
    CHUNKS: gl.constexpr, PIECES: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply a group's 64 rows: 32 gate and 32 up rows where gated.

    The loop has no first chunk of its own, although it would spare an addition: ptxas 12.8 then
    uses addresses in one group that only another group has computed.
    """
    PIECE: gl.constexpr = x_ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PIECE, 16]
    )
    dtype: gl.constexpr = out.dtype.element_ty
    sums = ()
    for _ in gl.static_range(PIECES):
        sums = sums + (gl.zeros([64, PIECE], gl.float32, layout),)
    for chunk in range(CHUNKS):
        stage = chunk % STAGES
        mbarrier.wait(full.index(stage), (chunk // STAGES) & 1)
        w = w_ring.index(which * STAGES + stage).reshape([64, CHUNK])
        started = _start_products(w, x_ring, stage, sums, PIECES)
        sums = _wait(started, PIECES)  # those of the chunk before have ended
        gl.thread_barrier()
        before = (chunk + STAGES - 1) % STAGES
        mbarrier.arrive(empty.index(before), count=1, pred=chunk > 0)
    sums = _wait(sums, 0)
    if dtype == gl.float32:
        rows = row + which * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
        for piece in gl.static_range(PIECES):
            members = token + piece * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, layout))
            place = (part * M + members[None, :]) * N + rows[:, None]
            gl.store(out + place, sums[piece], mask=(members < M)[None, :] & (rows < N)[:, None])
    else:
        WIDTH: gl.constexpr = out_desc.block_shape[2]
        SLOTS: gl.constexpr = max(1, PIECE * WIDTH // (64 * CHUNK))  # of the ring, per piece
        gl.thread_barrier()
        for piece in gl.static_range(PIECES):
            if GATED:
                pairs = sums[piece].reshape([4, 2, 8, PIECE]).permute((0, 2, 3, 1))
                gate, up = gl.split(pairs)
                y = (gate / (1.0 + gl.exp(-gate)) * up).reshape([32, PIECE])
            else:
                y = sums[piece]
            tile = w_ring.index(which * STAGES + piece * SLOTS)._reinterpret(
                dtype, out_desc.block_shape, out_desc.layout
            )
            tile.reshape([PIECE, WIDTH]).permute((1, 0)).store(y.to(dtype))
        fence_async_shared()
        gl.thread_barrier()
        for piece in gl.static_range(PIECES):
            tile = w_ring.index(which * STAGES + piece * SLOTS)._reinterpret(
                dtype, out_desc.block_shape, out_desc.layout
            )
            place = [part, token + piece * PIECE, row + which * WIDTH]
            tma.async_copy_shared_to_global(out_desc, place, tile)
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def many_kernel(
    x_desc, w_desc, out_desc, out, M, N,
    COLUMNS: gl.constexpr, PIECES: gl.constexpr, GROUPS: gl.constexpr, GATED: gl.constexpr,
    STAGES: gl.constexpr, TRIGGER: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute [PIECES * PIECE, 64 GROUPS] outputs over COLUMNS columns; GATED: half of them.

    x_desc describes x [M, K] in boxes of [PIECE, 64]; w_desc the weight [N, K] in boxes of
    [64, 64], or where GATED as [N / 16, 2, 8, K] in boxes of [4, 2, 8, 64]; out_desc the result
    [parts, M, outputs] in boxes of [1, PIECE, 64 or 32] (not read if out is fp32). 4 warps, and
    those of the other groups and the loading one.
    """
    if TRIGGER == 1:
        let_next_start()
    CHUNKS: gl.constexpr = COLUMNS // CHUNK
    row = gl.program_id(1) * (32 * GROUPS if GATED else 64 * GROUPS)
    token = gl.program_id(0) * (PIECES * x_desc.block_shape[0])
    part = gl.program_id(2)
    x_ring = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES * PIECES] + x_desc.block_shape, x_desc.layout
    )
    w_ring = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES * GROUPS] + w_desc.block_shape, w_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    given = (out, out_desc, x_ring, w_ring, full, empty, row, token, part, M, N)
    sizes: gl.constexpr = (CHUNKS, PIECES, GATED, STAGES)
    loaded = (x_desc, w_desc, x_ring, w_ring, full, empty, row, token, part * COLUMNS)
    counts: gl.constexpr = (CHUNKS, PIECES, GROUPS, GATED, STAGES, TRIGGER)
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


def many(
    form: Many,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply tokens by a weight.

    Args:
        form: the settings; split_k * 64 divides K, and 16 divides N.
        x: [T, K] bf16 or fp16, 16-byte aligned.
        weight: [N, K], or [2F, K] (gate rows, then up rows) where gated.
        gated: return silu(gate) * up, [T, F], in x's dtype; split_k is 1.
        dtype: of the result, x's by default; partials ignore it.

    Returns:
        [T, N] or [T, F]; [P, T, N] partials if the form splits K.
    """
    (tokens, columns), rows = x.shape, weight.shape[0]
    if form.split_k > 1:
        dtype = x.dtype if form.narrow else torch.float32
    dtype = dtype or x.dtype
    assert not gated or dtype == x.dtype, "a gated result has x's dtype"
    outputs = rows // 2 if gated else rows
    out = torch.empty(form.split_k, tokens, outputs, dtype=dtype, device=x.device)
    tiles = cdiv(rows, 64 * form.groups)
    many_kernel[(cdiv(tokens, form.piece * form.pieces), tiles, form.split_k)](
        *describe_all(form, x, weight, out, gated), out, tokens, rows,
        columns // form.split_k, form.pieces, form.groups, gated, form.stages, form.trigger,
        form.group_registers(LOADS.value), num_warps=4, maxnreg=form.registers, launch_pdl=True,
    )  # fmt: skip
    return out if form.split_k > 1 else out[0]


def describe_all(
    form: Many, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, gated: bool
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """Describe x, the weight and the result [parts, T, outputs] to the bulk copy engine."""
    rows, columns = weight.shape
    x_desc = describe(x, [form.piece, CHUNK.value])
    if gated:  # blocks of eight gate rows, and the eight up rows that belong to them
        shape, strides = (rows // 16, 2, 8, columns), (8 * columns, rows // 2 * columns, columns, 1)
        w_desc = describe(weight.as_strided(shape, strides), [4, 2, 8, CHUNK.value])
    else:
        w_desc = describe(weight, [64, CHUNK.value])
    if out.dtype == torch.float32:
        return x_desc, w_desc, x_desc
    return x_desc, w_desc, describe(out, [1, form.piece, 32 if gated else 64])
