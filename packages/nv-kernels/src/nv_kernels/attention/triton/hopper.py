"""The chunk kernel for Hopper: warps that load, and two groups of warps that compute.

Does the same work as `prefill`, for cards with wgmma and bulk tensor copies. A loading warp
(hopper_items) keeps STAGES blocks of keys and values in flight; each of two warp groups computes 64
rows, so that one computes its softmax while the other uses the tensor cores. A group starts the
next scores before it multiplies the last weights by the values (FlashAttention-3, Shah et al.
2024). Blocks run from the diagonal down to the first. Programs take tiles until none is left, so
that the end of one tile overlaps the start of the next. Written in Gluon, where warps can have
roles. Gluon is experimental: import this module only on a Hopper card.
"""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from nv_kernels.attention.triton.hopper_items import (
    HALF,
    load_blocks,
    load_queries,
    read_item,
    take,
    write_zeros,
)
from nv_kernels.launch.triton_previous_gluon import let_next_start, wait_for_previous

LOWEST = gl.constexpr(-1.0e30)  # in place of -inf: differences stay finite
# Below every real score and far above LOWEST: a row that sees no key of its first block gives that
# block weight 0. (With LOWEST as the maximum, the rounding of LOWEST * scale would decide.)
FLOOR = gl.constexpr(-1.0e20)


@gluon.jit
def _softmax(scores, top, qk_scale):
    """Return the new row maxima, the factor for the previous sums, and the weights."""
    new_top = gl.maximum(top, gl.max(scores, 1) * qk_scale)
    weights = gl.exp2(scores * qk_scale - gl.expand_dims(new_top, 1))
    return new_top, gl.exp2(top - new_top), weights


@gluon.jit
def _compute(
    which, q_ptr, out_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    items, item_full, item_empty, records_ptr, num_tiles, num_items,
    qk_scale, v_scale, out_token: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_TOKEN: gl.constexpr, Q_HEAD: gl.constexpr,
):  # fmt: skip
    """Compute rows which * 64 to which * 64 + 63 of each item."""
    dtype: gl.constexpr = q_tiles.dtype
    across: gl.constexpr = HEAD_DIM // 8  # threads along a row, 16 bytes each
    rows_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)

    q_tile = q_tiles.index(which)
    s_member = which * HALF + gl.arange(0, HALF, gl.SliceLayout(1, s_layout))
    position = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    none = gl.zeros([HALF, BLOCK_N], gl.float32, s_layout)
    base = gl.to_tensor(0)  # blocks of the items before
    # Load the next item's queries while this one ends, where the registers suffice.
    EARLY: gl.constexpr = HEAD_DIM <= 128 and HALF % GROUP == 0
    turn = gl.to_tensor(0)
    item = take(items, item_full, item_empty, turn)
    head, _, query, num_queries, seen, context = read_item(records_ptr, num_tiles, num_items, item)
    if EARLY:
        q = load_queries(
            q_ptr, which, head, query, num_queries, rows_layout, GROUP, HEAD_DIM, Q_TOKEN, Q_HEAD
        )
    while item < num_items:
        if not EARLY:
            q = load_queries(
                q_ptr, which, head, query, num_queries, rows_layout,
                GROUP, HEAD_DIM, Q_TOKEN, Q_HEAD,
            )  # fmt: skip
        q_tile.store(q)
        fence_async_shared()
        gl.thread_barrier()
        turn += 1
        item = take(items, item_full, item_empty, turn)
        next_head, _, next_query, next_queries, next_seen, next_context = read_item(
            records_ptr, num_tiles, num_items, item
        )
        end = gl.cdiv(seen + num_queries - 1, BLOCK_N)
        visible = seen + gl.minimum(s_member // GROUP, num_queries - 1)  # keys each row sees
        clear = seen // BLOCK_N  # blocks that every row sees in full

        stage = base % STAGES
        mbarrier.wait(k_full.index(stage), (base // STAGES) & 1)
        k = k_tiles.index(stage).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
        first = warpgroup_mma(q_tile, k, warpgroup_mma_init(none), use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(first,))
        gl.thread_barrier()
        mbarrier.arrive(k_empty.index(stage), count=1)
        key = (end - 1) * BLOCK_N + position
        scores = gl.where(gl.expand_dims(key, 0) < gl.expand_dims(visible, 1), scores, LOWEST)
        top = gl.maximum(gl.max(scores, 1) * qk_scale, FLOOR)
        weights = gl.exp2(scores * qk_scale - gl.expand_dims(top, 1))
        total = gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(dtype), p_layout)
        acc = gl.zeros([HALF, HEAD_DIM], gl.float32, o_layout)
        if end * BLOCK_N > context:
            # The cache past the sequence's end is undefined, and NaN times 0 is NaN.
            mbarrier.wait(v_full.index(stage), (base // STAGES) & 1)
            last = v_tiles.index(stage).reshape([BLOCK_N, HEAD_DIM])
            value_key = (end - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, rows_layout))
            values = last.load(rows_layout)
            values = gl.where(gl.expand_dims(value_key < context, 1), values, 0.0)
            last.store(values.to(dtype))
            fence_async_shared()
            gl.thread_barrier()
        for index in range(1, end):
            before = (base + index - 1) % STAGES
            before_phase = ((base + index - 1) // STAGES) & 1
            stage = (base + index) % STAGES
            mbarrier.wait(k_full.index(stage), ((base + index) // STAGES) & 1)
            k = k_tiles.index(stage).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
            next_scores = warpgroup_mma(
                q_tile, k, warpgroup_mma_init(none), use_acc=False, is_async=True
            )
            mbarrier.wait(v_full.index(before), before_phase)
            v = v_tiles.index(before).reshape([BLOCK_N, HEAD_DIM])
            running = warpgroup_mma(p, v, warpgroup_mma_init(acc), is_async=True)
            # All results in flight are arguments of the wait, so that no code reads them earlier.
            scores, running, p = warpgroup_mma_wait(
                num_outstanding=1, deps=(next_scores, running, p)
            )
            gl.thread_barrier()
            mbarrier.arrive(k_empty.index(stage), count=1)
            if end - 1 - index >= clear:
                key = (end - 1 - index) * BLOCK_N + position
                scores = gl.where(
                    gl.expand_dims(key, 0) < gl.expand_dims(visible, 1), scores, LOWEST
                )
            top, fade, weights = _softmax(scores, top, qk_scale)
            total = total * fade + gl.sum(weights, 1)
            acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(running, p))
            gl.thread_barrier()
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = acc * gl.expand_dims(gl.convert_layout(fade, o_rows), 1)
            p = gl.convert_layout(weights.to(dtype), p_layout)
        base += end
        before = (base - 1) % STAGES
        if EARLY:
            q = load_queries(
                q_ptr, which, next_head, next_query, next_queries, rows_layout,
                GROUP, HEAD_DIM, Q_TOKEN, Q_HEAD,
            )  # fmt: skip
        mbarrier.wait(v_full.index(before), ((base - 1) // STAGES) & 1)
        v = v_tiles.index(before).reshape([BLOCK_N, HEAD_DIM])
        running = warpgroup_mma(p, v, warpgroup_mma_init(acc), is_async=True)
        acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(running, p))
        gl.thread_barrier()
        mbarrier.arrive(v_empty.index(before), count=1)
        share = gl.convert_layout(v_scale / total, o_rows)
        result = gl.convert_layout((acc * gl.expand_dims(share, 1)).to(dtype), rows_layout)
        member = which * HALF + gl.arange(0, HALF, gl.SliceLayout(1, rows_layout))
        column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, rows_layout))
        real = member // GROUP < gl.minimum(num_queries, 2 * HALF // GROUP)
        spot = (member // GROUP) * out_token + (head * GROUP + member % GROUP) * HEAD_DIM
        spots = gl.expand_dims(spot, 1) + gl.expand_dims(column, 0)
        out_row = out_ptr + query.to(gl.int64) * out_token
        gl.store(out_row + spots, result, mask=gl.expand_dims(real, 1))
        head, query, num_queries = next_head, next_query, next_queries
        seen, context = next_seen, next_context


@gluon.jit(do_not_specialize=["table_stride", "num_records", "num_tokens"])
def prefill_hopper_kernel(
    q_ptr, k_desc, v_desc, block_tables_ptr, out_ptr, records_ptr,
    table_stride, num_records, num_tokens, qk_scale, v_scale,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_TOKEN: gl.constexpr, Q_HEAD: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Attend tiles of 128 // GROUP query tokens for one kv head; a program computes several.

    Like `prefill_attention_kernel`, with the same records. Launched with 4 warps and at most one
    program per multiprocessor. k_desc and v_desc describe the cache as [blocks, Hkv, block_size, D]
    in boxes of [1, 1, BLOCK_N, D].
    """
    if PDL:
        wait_for_previous()
        let_next_start()
    num_tiles = gl.load(records_ptr)
    num_used = gl.load(records_ptr + 1)
    out_token: gl.constexpr = NUM_KV_HEADS * GROUP * HEAD_DIM
    write_zeros(out_ptr, num_used, num_tokens, out_token)
    if num_tiles == 0:
        return
    num_items = num_tiles * NUM_KV_HEADS
    dtype: gl.constexpr = k_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, HEAD_DIM], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [2, HALF, HEAD_DIM], q_layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    items = gl.allocate_shared_memory(gl.int32, [2, 1], shared)
    item_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    item_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for side in gl.static_range(2):
        mbarrier.init(item_full.index(side), count=1)
        mbarrier.init(item_empty.index(side), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    0, q_ptr, out_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                    items, item_full, item_empty, records_ptr, num_tiles, num_items,
                    qk_scale, v_scale, out_token,
                    GROUP, HEAD_DIM, BLOCK_N, STAGES, Q_TOKEN, Q_HEAD,
                ),
            ),
            (
                _compute,
                (
                    1, q_ptr, out_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                    items, item_full, item_empty, records_ptr, num_tiles, num_items,
                    qk_scale, v_scale, out_token,
                    GROUP, HEAD_DIM, BLOCK_N, STAGES, Q_TOKEN, Q_HEAD,
                ),
            ),
            (
                load_blocks,
                (
                    k_desc, v_desc, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                    items, item_full, item_empty, records_ptr, num_tiles, num_items,
                    block_tables_ptr, table_stride,
                    BLOCK_SIZE, BLOCK_N, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
