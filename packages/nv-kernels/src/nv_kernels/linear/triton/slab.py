"""3 to 64 tokens times a weight on Hopper: the weights are loaded before the wait.

Written in Gluon, where a loop's loads can be split: a program copies its whole weight slab
[64 rows, K / split_k] into shared memory by TMA before it waits for the kernel that writes x, then
runs wgmma with the weight rows on the 64-row side (tokens on the other: no padding to 64).
Triton's own pipeliner starts the loads of x and the weight together, after the wait.

`tuned` decides when to use it. Gluon is experimental: import this module only with `gluon_module`.
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from nv_kernels.launch.descriptors import describe
from nv_kernels.launch.sizes import cdiv
from nv_kernels.launch.triton_previous_gluon import let_next_start, wait_for_previous
from nv_kernels.linear.triton.result import empty_result

if TYPE_CHECKING:
    import torch

    from nv_kernels.linear.tuned import Slab

BLOCK_K = gl.constexpr(64)
RING_BYTES = 64 * 1024  # of x in shared memory, if not all of x fits
SHARED_BYTES = 225_000


@gluon.jit
def _start_x(x_desc, x_tiles, ready, token, first, chunk: gl.constexpr, STAGES: gl.constexpr):
    mbarrier.expect(ready.index(chunk), x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(
        x_desc, [token, first + chunk * BLOCK_K], ready.index(chunk), x_tiles.index(chunk % STAGES)
    )


@gluon.jit
def _start_weights(
    w_desc, tail_desc, slab, ready, row, first, N, chunk,
    GATED: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Start one chunk's rows into 64 rows of the slab, kept as 8 atoms of 8 rows."""
    bar = ready.index(chunk)
    column = first + chunk * BLOCK_K
    dtype: gl.constexpr = w_desc.dtype
    if GATED:
        mbarrier.expect(bar, 2 * HALF * BLOCK_K * 2)
        for side in gl.static_range(2):
            start = row + side * (N // 2)
            main = slab.index(chunk * 8 + side * 4)._reinterpret(
                dtype, w_desc.block_shape, w_desc.layout
            )
            tma.async_copy_global_to_shared(w_desc, [start, column], bar, main)
            if HALF == 24:
                tail = slab.index(chunk * 8 + side * 4 + 2)
                tma.async_copy_global_to_shared(tail_desc, [start + 16, column], bar, tail)
    else:
        mbarrier.expect(bar, 64 * BLOCK_K * 2)
        main = slab.index(chunk * 8)._reinterpret(dtype, w_desc.block_shape, w_desc.layout)
        tma.async_copy_global_to_shared(w_desc, [row, column], bar, main)


@gluon.jit(do_not_specialize=["M", "num_chunks"])
def slab_kernel(
    x_desc, w_desc, tail_desc, out, M, N, num_chunks,
    COLUMNS: gl.constexpr, BLOCK_M: gl.constexpr, GATED: gl.constexpr, HALF: gl.constexpr,
    STAGES: gl.constexpr, TRIGGER: gl.constexpr,
):  # fmt: skip
    """Compute [BLOCK_M, 64] outputs over COLUMNS columns; GATED: HALF gate and HALF up rows."""
    CHUNKS: gl.constexpr = COLUMNS // BLOCK_K
    dtype: gl.constexpr = w_desc.dtype
    if TRIGGER == 1:
        let_next_start()
    row = gl.program_id(0) * (HALF if GATED else 64)
    token = gl.program_id(1) * BLOCK_M
    first = gl.program_id(2) * COLUMNS
    slab = gl.allocate_shared_memory(dtype, [CHUNKS * 8, 8, BLOCK_K], tail_desc.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ready = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    x_ready = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    for chunk in gl.static_range(CHUNKS):
        mbarrier.init(w_ready.index(chunk), count=1)
        mbarrier.init(x_ready.index(chunk), count=1)
    fence_async_shared()
    for chunk in range(num_chunks):  # not a constant: an unrolled loop would need 255 registers
        _start_weights(w_desc, tail_desc, slab, w_ready, row, first, N, chunk, GATED, HALF)
    if TRIGGER > 0:
        wait_for_previous()
        if TRIGGER == 2:
            let_next_start()
    for chunk in gl.static_range(STAGES):
        _start_x(x_desc, x_tiles, x_ready, token, first, chunk, STAGES)
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16]
    )
    sums = warpgroup_mma_init(gl.zeros([64, BLOCK_M], gl.float32, layout))
    for chunk in gl.static_range(CHUNKS):
        mbarrier.wait(w_ready.index(chunk), 0)
        mbarrier.wait(x_ready.index(chunk), 0)
        rows = slab.index(chunk * 8)._reinterpret(dtype, [64, BLOCK_K], w_desc.layout)
        tokens = x_tiles.index(chunk % STAGES).permute((1, 0))
        sums = warpgroup_mma(rows, tokens, sums, is_async=True)
        if chunk > 0 and chunk - 1 + STAGES < CHUNKS:  # the chunk before is no longer read
            sums = warpgroup_mma_wait(num_outstanding=1, deps=(sums,))
            gl.thread_barrier()
            _start_x(x_desc, x_tiles, x_ready, token, first, chunk - 1 + STAGES, STAGES)
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    if TRIGGER == 3:
        let_next_start()
    for chunk in gl.static_range(CHUNKS):
        mbarrier.invalidate(w_ready.index(chunk))
        mbarrier.invalidate(x_ready.index(chunk))
    if GATED:
        square = gl.allocate_shared_memory(
            gl.float32, [64, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
        square.store(sums)
        gl.thread_barrier()
        half: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [1, 4], [0, 1])
        gate = square.slice(0, 32, 0).load(half)
        up = square.slice(32, 32, 0).load(half)
        y = gate / (1.0 + gl.exp(-gate)) * up
        feature = gl.arange(0, 32, gl.SliceLayout(1, half))
        member = token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, half))
        place = member[None, :] * (N // 2) + row + feature[:, None]
        mask = (member < M)[None, :] & (feature < HALF)[:, None]
        gl.store(out + place, y.to(out.dtype.element_ty), mask=mask)
    else:
        whole: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
        y = gl.convert_layout(sums, whole)
        output = row + gl.arange(0, 64, gl.SliceLayout(1, whole))
        member = token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, whole))
        place = (gl.program_id(2) * M + member[None, :]) * N + output[:, None]
        gl.store(out + place, y.to(out.dtype.element_ty), mask=(member < M)[None, :])


def slab(
    form: Slab,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply tokens by a weight.

    Args:
        form: the settings; split_k * 64 divides K, 64 divides N (half divides F where gated).
        x: [T, K] bf16 or fp16, 16-byte aligned.
        weight: [N, K], or [2F, K] (gate rows, then up rows) where gated.
        gated: return silu(gate) * up, [T, F].
        dtype: of the result, x's by default; partials are fp32.

    Returns:
        [T, N] or [T, F]; [P, T, N] partials if the form splits K.
    """
    tokens, columns = x.shape
    rows = weight.shape[0]
    share = columns // form.split_k
    outputs = rows // 2 if gated else rows
    out = empty_result(form.split_k, tokens, outputs, dtype or x.dtype, x.device)
    main = 64 if not gated else 32 if form.half == 32 else 16
    tiles = rows // 2 // form.half if gated else rows // 64
    grid = (tiles, cdiv(tokens, form.block_m), form.split_k)
    slab_kernel[grid](
        describe(x, [form.block_m, 64]), describe(weight, [main, 64]), describe(weight, [8, 64]),
        out, tokens,
        rows, share // 64, share, form.block_m, gated, form.half, num_stages(share, form.block_m),
        form.trigger, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out


def num_stages(share: int, block_m: int) -> int:
    """Count the 64-column chunks of x in shared memory at once: all of them if they fit."""
    chunks = share // 64
    if (64 + block_m) * share * 2 <= SHARED_BYTES:
        return chunks
    return min(chunks, RING_BYTES // (block_m * 128))
