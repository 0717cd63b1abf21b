"""1 to 64 tokens in codes of 8 bits times a weight on Hopper, in flight before the wait.

Written in Gluon, where a loop's loads can be split: a program starts the copies of its first STAGES
chunks of the weight before it waits for the kernel that writes x, and keeps STAGES chunks of 128
columns in flight. Weight rows are on wgmma's 64-row side. Sums of e4m3 products, which Hopper adds
in about 14 bits, are added in fp32 after each chunk.

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

    from nv_kernels.linear.quantized.tuned import Ring

CHUNK = gl.constexpr(128)  # columns of a chunk


@gluon.jit
def _start(desc, tiles, bar, first_at, second_at, chunk, STAGES: gl.constexpr):
    tma.async_copy_global_to_shared(
        desc, [0, first_at, second_at + chunk * CHUNK], bar, tiles.index(chunk % STAGES)
    )


@gluon.jit
def _multiply(
    w_tiles, x_tiles, ready, chunk, sums,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, USE_SUMS: gl.constexpr,
):  # fmt: skip
    """Start the product of a chunk when its copies have ended."""
    slot = chunk % STAGES
    mbarrier.wait(ready.index(slot), (chunk // STAGES) & 1)
    w = w_tiles.index(slot).reshape([ROWS, CHUNK])
    x = x_tiles.index(slot).reshape([BLOCK_M, CHUNK]).permute((1, 0))
    return warpgroup_mma(w, x, sums, use_acc=USE_SUMS, is_async=True)


@gluon.jit(do_not_specialize=["M"])
def codes_slab_kernel(
    x_desc, w_desc, x_scale, w_scale, out, M, N,
    K: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
    GATED: gl.constexpr, X_GROUPS: gl.constexpr, W_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    TRIGGER: gl.constexpr,
):  # fmt: skip
    """Compute [BLOCK_M, ROWS] outputs over COLUMNS columns; GATED: half of them gate, half up rows.

    x_desc describes x as [1, M, K] in boxes of [1, BLOCK_M, 128], w_desc the weight as [1, N, K],
    or as [2, N / 2, K] if GATED. x_scale [X_GROUPS, M]; w_scale [N], or of blocks if W_BLOCKS.
    """
    CHUNKS: gl.constexpr = COLUMNS // CHUNK
    IS_INT: gl.constexpr = w_desc.dtype == gl.int8
    SCALED: gl.constexpr = X_GROUPS > 1 or W_BLOCKS
    KEPT: gl.constexpr = gl.int32 if IS_INT else gl.float32
    if TRIGGER == 1:
        let_next_start()
    tile = gl.program_id(0)
    row = tile * (ROWS // 2 if GATED else ROWS)
    token = gl.program_id(1) * BLOCK_M
    first = gl.program_id(2) * COLUMNS
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_shape, w_desc.layout)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_shape, x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
    fence_async_shared()
    num_bytes: gl.constexpr = x_desc.block_type.nbytes + w_desc.block_type.nbytes
    for slot in gl.static_range(min(STAGES, CHUNKS)):
        mbarrier.expect(ready.index(slot), num_bytes)
        _start(w_desc, w_tiles, ready.index(slot), row, first, slot, STAGES)
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 32]
    )
    at = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    if GATED:
        rows = row + at % (ROWS // 2) + at // (ROWS // 2) * (N // 2)
    else:
        rows = row + at
    members = token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    if W_BLOCKS:
        w_scale_at = w_scale + rows // 128 * (K // 128)
    else:
        w_scale_at = w_scale + rows
        row_scale = gl.load(w_scale_at)
    x_scale_at = x_scale + members % M
    if TRIGGER > 0:
        wait_for_previous()
        if TRIGGER == 2:
            let_next_start()
    for slot in gl.static_range(min(STAGES, CHUNKS)):
        _start(x_desc, x_tiles, ready.index(slot), token, first, slot, STAGES)
    if X_GROUPS == 1:
        token_scale = gl.load(x_scale_at)
    sums = gl.zeros([ROWS, BLOCK_M], KEPT, layout)
    none = gl.zeros([ROWS, BLOCK_M], KEPT, layout)
    if IS_INT:
        running = warpgroup_mma_init(sums)
    else:
        running = _multiply(w_tiles, x_tiles, ready, 0, none, ROWS, BLOCK_M, STAGES, False)
    block = first // CHUNK
    if W_BLOCKS:
        row_scale = gl.load(w_scale_at + block)
    if X_GROUPS > 1:
        token_scale = gl.load(x_scale_at + block * M)
    for chunk in range(0 if IS_INT else 1, CHUNKS):
        if IS_INT:
            running = _multiply(
                w_tiles, x_tiles, ready, chunk, running, ROWS, BLOCK_M, STAGES, True
            )
            running = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(running,)))
        else:
            started = _multiply(w_tiles, x_tiles, ready, chunk, none, ROWS, BLOCK_M, STAGES, False)
            product = warpgroup_mma_wait(num_outstanding=1, deps=(running,))
            if SCALED:
                product = product * row_scale[:, None] * token_scale[None, :]
                if W_BLOCKS:
                    row_scale = gl.load(w_scale_at + (block + chunk))
                if X_GROUPS > 1:
                    token_scale = gl.load(x_scale_at + (block + chunk) * M)
            sums += product
            running = started
        if chunk > 0 and chunk - 1 + STAGES < CHUNKS:  # its place is free
            later = chunk - 1 + STAGES
            gl.thread_barrier()
            bar = ready.index(later % STAGES)
            mbarrier.expect(bar, num_bytes)
            _start(w_desc, w_tiles, bar, row, first, later, STAGES)
            _start(x_desc, x_tiles, bar, token, first, later, STAGES)
    product = warpgroup_mma_wait(num_outstanding=0, deps=(running,))
    if IS_INT:
        total = product.to(gl.float32)
    elif SCALED:
        total = sums + product * row_scale[:, None] * token_scale[None, :]
    else:
        total = sums + product
    if not SCALED:
        total = total * row_scale[:, None] * token_scale[None, :]
    if TRIGGER == 3:
        let_next_start()
    if GATED:
        HALF: gl.constexpr = ROWS // 2
        square = gl.allocate_shared_memory(
            gl.float32, [ROWS, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
        square.store(total)
        gl.thread_barrier()
        spread: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [1, 4], [0, 1])
        gate = square.slice(0, HALF, 0).load(spread)
        up = square.slice(HALF, HALF, 0).load(spread)
        y = gate / (1.0 + gl.exp(-gate)) * up
        feature = row + gl.arange(0, HALF, gl.SliceLayout(1, spread))
        member = token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, spread))
        place = member[None, :] * (N // 2) + feature[:, None]
        gl.store(out + place, y.to(out.dtype.element_ty), mask=(member < M)[None, :])
    else:
        whole: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
        y = gl.convert_layout(total, whole)
        output = row + gl.arange(0, ROWS, gl.SliceLayout(1, whole))
        member = token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, whole))
        place = (gl.program_id(2) * M + member[None, :]) * N + output[:, None]
        gl.store(out + place, y.to(out.dtype.element_ty), mask=(member < M)[None, :])


def codes_slab(
    form: Ring,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    dtype: torch.dtype,
    gated: bool = False,
) -> torch.Tensor:
    """Multiply codes of tokens by codes of a weight; `codes_slab_fits` must hold.

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
    grid = (rows // form.rows, cdiv(tokens, form.block_m), form.split_k)
    codes_slab_kernel[grid](
        describe(x[None], [1, form.block_m, 128]),
        describe(weight.view(halves, -1, columns), [halves, form.rows // halves, 128]),
        x_scale, w_scale, out, tokens, rows,
        columns, columns // form.split_k, form.block_m, form.rows, gated, x_scale.shape[1],
        w_scale.dim() == 2, form.stages, form.trigger, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out


def codes_slab_fits(form: Ring, x: torch.Tensor, weight: torch.Tensor, *, gated: bool) -> bool:
    """Return whether the kernel supports these tensors: shapes that divide, aligned addresses."""
    rows, columns = weight.shape
    return (
        x.shape[0] > 0
        and rows % (2 * form.rows if gated else form.rows) == 0
        and columns % (128 * form.split_k) == 0
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (x, weight))
    )
