"""The kernel of the gated product on Hopper: warps that load, and two groups that compute.

A loading warp keeps STAGES chunks of x and of the weight in flight; each of two warp groups owns 64
tokens of a tile. A chunk's gate rows and up rows lie one after the other in shared memory, so that
one wgmma multiplies both and a thread has the gate and the up of the same features. A group gates
its half in registers while the other group still multiplies and the next tile's chunks arrive
(producers and consumers as in CUTLASS's Hopper kernels). Tiles are computed in groups of GROUP
token tiles, so that their weights and tokens stay in L2.

Gluon is experimental: import this module only on a Hopper card.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nv_kernels.launch.triton_previous_gluon import let_next_start, wait_for_previous

HALF = gl.constexpr(64)  # tokens of a computing warp group
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _place(tile, token_tiles, feature_tiles, GROUP: gl.constexpr):
    """Return a tile's place: GROUP token tiles by every feature tile, the token tiles first."""
    first = tile // (GROUP * feature_tiles) * GROUP
    height = gl.minimum(token_tiles - first, GROUP)
    inside = tile % (GROUP * feature_tiles)
    return first + inside % height, inside // height


@gluon.jit
def _load(
    x_desc, w_desc, x_ring, w_ring, full, empty, token_tiles, feature_tiles, num_chunks,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Load every chunk of every tile of this program, in order.

    The loads of the weight's first chunks start before the wait for x.
    """
    num_tiles = token_tiles * feature_tiles
    num_early = gl.minimum(num_chunks, STAGES)
    _, feature = _place(gl.program_id(0), token_tiles, feature_tiles, GROUP)
    for chunk in range(num_early):
        bar = full.index(chunk)
        mbarrier.expect(bar, x_desc.block_type.nbytes + w_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            w_desc, [0, feature * BLOCK_N, chunk * BLOCK_K], bar, w_ring.index(chunk)
        )
    if PDL:
        wait_for_previous()
    count = gl.to_tensor(0)  # chunks loaded
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        token, feature = _place(tile, token_tiles, feature_tiles, GROUP)
        for chunk in range(num_chunks):
            stage = count % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            late = count >= num_early
            num_bytes: gl.constexpr = x_desc.block_type.nbytes + w_desc.block_type.nbytes
            mbarrier.expect(bar, num_bytes, pred=late)
            tma.async_copy_global_to_shared(
                x_desc, [token * (2 * HALF), chunk * BLOCK_K], bar, x_ring.index(stage)
            )
            tma.async_copy_global_to_shared(
                w_desc, [0, feature * BLOCK_N, chunk * BLOCK_K], bar, w_ring.index(stage), pred=late
            )
            count += 1
    if PDL:
        let_next_start()


@gluon.jit
def _silu(gate):
    """Return gate / (1 + exp(-gate)), with an approximate reciprocal (1 ulp).

    Two features share the reciprocal of their product, because reciprocals are slow. The product
    must not overflow: below -41, silu is replaced by gate * 2^-60.
    """
    below = 1.0 + gl.exp2(gl.minimum(-LOG2_E * gate, 60.0))
    share = gl.inline_asm_elementwise(
        "{ .reg .f32 both; mul.f32 both, $2, $3; rcp.approx.ftz.f32 both, both; "
        "mul.f32 $0, both, $3; mul.f32 $1, both, $2; }",
        "=&f,=&f,f,f", [below], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip
    return gate * share


@gluon.jit
def _compute(
    which: gl.constexpr, out_desc, x_ring, w_ring, y_tiles, full, empty,
    token_tiles, feature_tiles, num_chunks,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Multiply and gate tokens which * 64 to which * 64 + 63 of each tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * BLOCK_N, 16]
    )
    half_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    y_tile = y_tiles.index(which)
    num_tiles = token_tiles * feature_tiles
    count = gl.to_tensor(0)  # chunks used
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        none = gl.zeros([HALF, 2 * BLOCK_N], gl.float32, layout)
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        x = x_ring.index(stage).slice(which * HALF, HALF)
        w = w_ring.index(stage).reshape([2 * BLOCK_N, BLOCK_K]).permute((1, 0))
        started = warpgroup_mma(x, w, none, use_acc=False, is_async=True)
        sums = warpgroup_mma_wait(num_outstanding=1, deps=(started,))
        for _ in range(1, num_chunks):
            before = count % STAGES
            count += 1
            stage = count % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            x = x_ring.index(stage).slice(which * HALF, HALF)
            w = w_ring.index(stage).reshape([2 * BLOCK_N, BLOCK_K]).permute((1, 0))
            started = warpgroup_mma(x, w, sums, is_async=True)
            sums = warpgroup_mma_wait(num_outstanding=1, deps=(started,))
            gl.thread_barrier()
            mbarrier.arrive(empty.index(before), count=1)
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        gl.thread_barrier()
        mbarrier.arrive(empty.index(count % STAGES), count=1)
        count += 1
        pairs = sums.reshape([HALF, 2, BLOCK_N]).permute((0, 2, 1))
        gate, up = gl.split(pairs)
        y = gl.convert_layout((_silu(gate) * up).to(out_desc.dtype), half_layout)
        tma.store_wait(0)
        gl.thread_barrier()
        y_tile.store(y)
        fence_async_shared()
        gl.thread_barrier()
        token, feature = _place(tile, token_tiles, feature_tiles, GROUP)
        tma.async_copy_shared_to_global(
            out_desc, [token * (2 * HALF) + which * HALF, feature * BLOCK_N], y_tile
        )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["token_tiles", "feature_tiles", "num_chunks"])
def gated_hopper_kernel(
    x_desc, w_desc, out_desc, token_tiles, feature_tiles, num_chunks,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Compute tiles of 128 tokens by BLOCK_N features, several per program, with 4 warps.

    x_desc describes x [T, K] in boxes of [128, BLOCK_K], w_desc the weight as [2, F, K] in boxes
    of [2, BLOCK_N, BLOCK_K], out_desc the result [T, F] in boxes of [64, BLOCK_N].
    """
    dtype: gl.constexpr = x_desc.dtype
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, 2 * HALF, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, 2, BLOCK_N, BLOCK_K], w_desc.layout)
    y_tiles = gl.allocate_shared_memory(dtype, [2, HALF, BLOCK_N], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    0, out_desc, x_ring, w_ring, y_tiles, full, empty,
                    token_tiles, feature_tiles, num_chunks,
                    BLOCK_N, BLOCK_K, STAGES, GROUP,
                ),
            ),
            (
                _compute,
                (
                    1, out_desc, x_ring, w_ring, y_tiles, full, empty,
                    token_tiles, feature_tiles, num_chunks,
                    BLOCK_N, BLOCK_K, STAGES, GROUP,
                ),
            ),
            (
                _load,
                (
                    x_desc, w_desc, x_ring, w_ring, full, empty,
                    token_tiles, feature_tiles, num_chunks,
                    BLOCK_N, BLOCK_K, STAGES, GROUP, PDL,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
