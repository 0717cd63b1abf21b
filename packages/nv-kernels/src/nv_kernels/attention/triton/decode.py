"""Paged attention of one query token per sequence: split keys, packed query heads, one launch.

Owns the decode kernel. `decode_plan` divides the work, `backend` holds the buffers.

A program computes one piece, a record of the plan: some tiles of one item, that is of one
(sequence, kv head) (FlashDecoding's split, Dao et al. 2023; PagedAttention's blocks, Kwon et al.
2023). Both products are transposed: keys, and the values' dims, lie along the tensor core's long
side, and the group's query heads are its 8 columns; as 16 rows they would be mostly padding. The
only piece of an item writes the output. Otherwise each piece writes a partial, and the program that
finishes last merges the item's partials in a fixed order, so results are bitwise repeatable. Rows
of context length 0 become 0. A sink joins the sum of an item's only piece, or of the merge.

With programmatic launch, the code before the wait reads only the plan, the block table and older
keys. So the plan, the block table, and all keys and values except a row's newest must be written at
least two kernels earlier, or by a kernel that does not let the next one start early.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nv_kernels.attention.triton.merge import LOWEST, merge_partials
from nv_kernels.attention.triton.scores import load_sinks, score_factor, soft_cap
from nv_kernels.cache.triton_fp8 import both_fp8
from nv_kernels.launch.triton_previous import prefetch_l2, wait_for_previous


@triton.jit(do_not_specialize=["table_stride"])
def decode_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    block_tables_ptr,
    out_ptr,
    partials_ptr,
    sums_ptr,
    counters_ptr,
    records_ptr,
    sinks_ptr,
    table_stride,
    qk_scale,
    v_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    KV_TOKEN: tl.constexpr,
    KV_HEAD: tl.constexpr,
    FP8: tl.constexpr,
    STAGES: tl.constexpr,
    MERGE: tl.constexpr,
    PREFETCH: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    CONVERT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend over one piece.

    q [rows, Hq, D] with strides Q_TOKEN, Q_HEAD; k, v: strides KV_* in loaded elements, which are
    int16 pairs where FP8; out [rows, Hq, D] contiguous; sinks [Hq] or None. qk_scale is the
    `score_scale`, and where FP8 but not CONVERT (the card converts e4m3) both scales hold the 2**8
    of the pairs. WINDOW, SOFTCAP: 0 if the layer has none. DIM: HEAD_DIM
    rounded up to a power of two. BLOCK_SIZE is a multiple of TILE, or divides it. MERGE partials
    are merged at a time. sums holds the base-2 logarithms of the partials' softmax sums.
    KEYS_FIRST: load the first keys before the queries, and before the wait if the newest key is not
    in this piece.
    """
    MEMBERS: tl.constexpr = 8 if GROUP <= 8 else 16  # of the products' short side
    WIDTH: tl.constexpr = HEAD_DIM // 2 if FP8 else HEAD_DIM  # of a key, in loaded elements
    WIDE: tl.constexpr = DIM // 2 if FP8 else DIM
    record = records_ptr + tl.program_id(0) * 8
    item = tl.load(record)
    first_tile = tl.load(record + 1)
    num_tiles = tl.load(record + 2)
    length = tl.load(record + 3)
    block = tl.load(record + 4)
    next_block = tl.load(record + 5)
    first_part = tl.load(record + 6)
    pieces = tl.load(record + 7)
    row = tl.maximum(item, 0) // NUM_KV_HEADS
    head = tl.maximum(item, 0) % NUM_KV_HEADS
    end_tile = first_tile + num_tiles
    table = block_tables_ptr + row.to(tl.int64) * table_stride
    token = tl.arange(0, TILE)
    column = tl.arange(0, DIM)
    lane = tl.arange(0, WIDE)
    member = tl.arange(0, MEMBERS)
    # The previous kernel writes the newest key: only the piece with it must wait before it reads
    # keys.
    has_newest = end_tile * TILE >= length
    if PREFETCH > 0:
        prefetch_tiles(
            k_ptr + head * KV_HEAD,
            v_ptr + head * KV_HEAD,
            table,
            first_tile,
            tl.where(has_newest, num_tiles, 0) if KEYS_FIRST else num_tiles,
            length,
            block,
            next_block,
            PREFETCH,
            TILE,
            BLOCK_SIZE,
            WIDTH,
            KV_BLOCK,
            KV_TOKEN,
            WINDOW,
        )
    if not KEYS_FIRST:
        wait_for_previous(PDL)
    elif PDL and has_newest:
        tl.extra.cuda.gdc_wait()
    if item < 0:
        if KEYS_FIRST:
            wait_for_previous(PDL)
        return
    real = (member < GROUP)[:, None]
    inside = real & (column < HEAD_DIM)[None, :]
    q_at = q_ptr + row * Q_TOKEN + (head * GROUP + member)[:, None] * Q_HEAD + column[None, :]
    if KEYS_FIRST:  # Triton issues a loop's first loads before its body, which loads the queries
        q0 = tl.zeros([MEMBERS, WIDE], tl.float16 if FP8 else q_ptr.dtype.element_ty)
        q1 = q0
    elif FP8:
        q0, q1 = load_pairs(q_at, inside, MEMBERS, WIDE)
    else:
        q0 = tl.load(q_at, mask=inside, other=0.0)
    if FP8:
        acc1 = tl.zeros([WIDE, MEMBERS], tl.float32)
    acc0 = tl.zeros([WIDE, MEMBERS], tl.float32)
    top = tl.full([MEMBERS], LOWEST, tl.float32)
    if sinks_ptr is not None:
        sink = load_sinks(sinks_ptr, head, member, GROUP)
        alone = pieces // 65536 == 1
        top = tl.where(alone, sink, top)
    factor = score_factor(qk_scale, SOFTCAP)
    weights = tl.zeros([TILE, MEMBERS], tl.float32)  # summed after the loop, once
    k_spot = (token * KV_TOKEN)[:, None] + lane[None, :] + head * KV_HEAD
    v_spot = (token * KV_TOKEN)[None, :] + lane[:, None] + head * KV_HEAD
    if BLOCK_SIZE < TILE:
        position = first_tile * TILE + token
        blocks = tl.load(
            table + position // BLOCK_SIZE, mask=is_read(position, length, WINDOW), other=0
        )
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        valid = is_read(token, length - tile * TILE, WINDOW)
        # Masked loads, not only masked scores: 820 tokens are 1.5 % less than 13 tiles of 64.
        k_there = valid[:, None] & (lane < WIDTH)[None, :]
        v_there = valid[None, :] & (lane < WIDTH)[:, None]
        if BLOCK_SIZE >= TILE:
            base = block.to(tl.int64) * KV_BLOCK + ((tile * TILE) % BLOCK_SIZE) * KV_TOKEN
            k = tl.load(k_ptr + base + k_spot, mask=k_there, other=0)
            v = tl.load(v_ptr + base + v_spot, mask=v_there, other=0)
            # Block numbers run two tiles ahead. Triton 3.6 does not pipeline a loop that yields
            # a carried value as it came, hence the maximum.
            block = tl.maximum(next_block, 0)
            next_block = tl.load(table + (tl.minimum(tile + 2, end_tile - 1) * TILE) // BLOCK_SIZE)
        else:
            base = blocks.to(tl.int64) * KV_BLOCK + (
                (token % BLOCK_SIZE) * KV_TOKEN + head * KV_HEAD
            )
            k = tl.load(k_ptr + base[:, None] + lane[None, :], mask=k_there, other=0)
            v = tl.load(v_ptr + base[None, :] + lane[:, None], mask=v_there, other=0)
            position = tl.minimum(tile + 1, end_tile - 1) * TILE + token
            blocks = tl.load(
                table + position // BLOCK_SIZE, mask=is_read(position, length, WINDOW), other=0
            )
        if KEYS_FIRST and tile == first_tile:
            wait_for_previous(PDL)
            if FP8:
                q0, q1 = load_pairs(q_at, inside, MEMBERS, WIDE)
            else:
                q0 = tl.load(q_at, mask=inside, other=0.0)
        if FP8:
            k_even, k_odd = both_fp8(k, CONVERT)
            scores = tl.dot(k_even, q0.T)
            scores = tl.dot(k_odd, q1.T, scores)
        else:
            scores = tl.dot(k, q0.T)
        if SOFTCAP > 0:
            scores = soft_cap(scores, qk_scale)
        scores = tl.where(valid[:, None], scores, LOWEST)
        new_top = tl.maximum(top, tl.max(scores, 0) * factor)
        p = tl.exp2(scores * factor - new_top[None, :])
        fade = tl.exp2(top - new_top)
        weights = weights * fade[None, :] + p
        if FP8:
            v_even, v_odd = both_fp8(v, CONVERT)
            acc0 = tl.dot(v_even, p.to(tl.float16), acc0 * fade[None, :])
            acc1 = tl.dot(v_odd, p.to(tl.float16), acc1 * fade[None, :])
        else:
            acc0 = tl.dot(v, p.to(v.dtype), acc0 * fade[None, :])
        top = new_top
    if KEYS_FIRST and num_tiles == 0:
        wait_for_previous(PDL)
    total = tl.sum(weights, 0)
    if sinks_ptr is not None:
        total += tl.where(alone, tl.exp2(sink - top), 0.0)
    total = tl.where(total > 0.0, total, 1.0)  # an empty row becomes 0
    share = (v_scale / total)[None, :]
    if FP8:
        acc = tl.interleave((acc0 * share).T, (acc1 * share).T)
    else:
        acc = (acc0 * share).T
    num_pieces = pieces // 65536
    out_row = out_ptr + (row * NUM_KV_HEADS + head) * (GROUP * HEAD_DIM)
    if num_pieces == 1:
        spot = member[:, None] * HEAD_DIM + column[None, :]
        tl.store(out_row + spot, acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        partial = first_part + pieces % 65536
        tl.store(sums_ptr + partial * GROUP + member, top + tl.log2(total), mask=member < GROUP)
        part = (partial * GROUP + member)[:, None] * DIM + column[None, :]
        tl.store(partials_ptr + part, acc, mask=real)
        tl.debug_barrier()  # all warps must have stored before one thread releases
        arrived = tl.atomic_add(counters_ptr + first_part, 1, sem="acq_rel", scope="gpu")
        if arrived == num_pieces - 1:
            merge_partials(
                partials_ptr,
                sums_ptr,
                out_row,
                first_part,
                num_pieces,
                sinks_ptr,
                head,
                GROUP,
                HEAD_DIM,
                DIM,
                MERGE,
            )
            tl.store(counters_ptr + first_part, 0)  # ready for the next layer


@triton.jit
def is_read(position, length, WINDOW: tl.constexpr):
    """Return which positions hold keys of a row of `length` keys, or of its last WINDOW."""
    if WINDOW > 0:
        read = (position < length) & (position >= length - WINDOW)
    else:
        read = position < length
    return read


@triton.jit
def load_pairs(q_at, inside, MEMBERS: tl.constexpr, WIDE: tl.constexpr):
    """Load the group's queries for fp8 keys: the even and the odd columns, in fp16."""
    q = tl.load(q_at, mask=inside, other=0.0).to(tl.float16)
    return tl.split(tl.reshape(q, [MEMBERS, WIDE, 2]))


@triton.jit
def prefetch_tiles(
    k_ptr,
    v_ptr,
    table,
    first_tile,
    num_tiles,
    length,
    block,
    next_block,
    PREFETCH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    KV_TOKEN: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Fetch a piece's first PREFETCH tiles into L2, which sees the writes of other kernels."""
    LINES: tl.constexpr = triton.next_power_of_2((WIDTH + 63) // 64)  # 128 bytes, 64 elements each
    line = tl.arange(0, TILE * LINES)
    token = line // LINES
    for ahead in tl.static_range(PREFETCH):
        tile = first_tile + ahead
        there = ahead < num_tiles
        wanted = there & is_read(token, length - tile * TILE, WINDOW)
        wanted = wanted & ((line % LINES) * 64 < WIDTH)
        if BLOCK_SIZE >= TILE:
            tile_block = block
            if ahead == 1:
                tile_block = next_block
            if ahead > 1:
                last = tl.maximum(tl.minimum(tile, first_tile + num_tiles - 1), 0)
                tile_block = tl.load(table + (last * TILE) // BLOCK_SIZE)
            start = tile_block.to(tl.int64) * KV_BLOCK + ((tile * TILE) % BLOCK_SIZE) * KV_TOKEN
            spot = start + token * KV_TOKEN + (line % LINES) * 64
        else:
            blocks = tl.load(table + (tile * TILE + token) // BLOCK_SIZE, mask=wanted, other=0)
            inner = (token % BLOCK_SIZE) * KV_TOKEN + (line % LINES) * 64
            spot = blocks.to(tl.int64) * KV_BLOCK + inner
        prefetch_l2(k_ptr + spot, wanted)
        prefetch_l2(v_ptr + spot, wanted)
