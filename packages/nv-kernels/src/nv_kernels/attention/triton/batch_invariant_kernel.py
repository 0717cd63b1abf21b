"""Paged causal attention whose bits for a token do not depend on the other rows of the step.

Owns the kernel for decode and chunk rows, and the one that merges the splits of spread rows.

A query tile has one height, however many of its rows are in use; keys come in tiles at absolute
positions, and SPLIT of them are a split: each split has a softmax of its own (FlashDecoding, Dao et
al. 2023), and splits are merged in order. A program either computes all splits of its tile and
merges them one by one, or, if rows are few, computes every `width`-th split and writes partials
that `merge_splits_kernel` merges in the same order with the same arithmetic: where a compiler might
fuse a product and a sum, the code asks for a fused operation. Keys that a row does not read have
weight 0, so the other rows of the tile do not matter; nor do splits without a key that the row
reads, whose sums are exact zeros. A sink is a last split, with a sum of 1 and no values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nv_kernels.attention.triton.scores import load_sinks, score_factor, soft_cap
from nv_kernels.cache.triton_fp8 import even_fp8, odd_fp8
from nv_kernels.launch.triton_previous import wait_for_previous

LOWEST = tl.constexpr(-1.0e30)  # in place of -inf: differences stay finite


@triton.jit
def merge(top, total, acc, new_top, new_total, new_acc):
    """Merge a split (maximum [M], sum [M], values [M, D]) into the ones before it."""
    highest = tl.maximum(top, new_top)
    fade = tl.exp2(top - highest)
    share = tl.exp2(new_top - highest)
    total = tl.fma(total, fade, new_total * share)
    acc = tl.fma(acc, tl.broadcast_to(fade[:, None], acc.shape), new_acc * share[:, None])
    return highest, total, acc


@triton.jit
def add_sinks(top, total, acc, sinks):
    """Merge sinks [M], in base 2, as a split with a sum of 1 and no values."""
    return merge(top, total, acc, sinks, tl.full(total.shape, 1.0, tl.float32), tl.zeros_like(acc))


@triton.jit
def normalised(total, acc, v_scale):
    """Divide by the sum; a row without keys is 0."""
    return acc * (v_scale / tl.where(total > 0.0, total, 1.0))[:, None]


@triton.jit(
    do_not_specialize=[
        "table_stride", "num_decodes", "width", "max_splits", "num_records", "num_tokens",
    ]
)  # fmt: skip
def batch_invariant_attention_kernel(
    q_ptr, k_ptr, v_ptr, block_tables_ptr, context_lens_ptr, records_ptr, out_ptr,
    partials_ptr, sums_ptr, sinks_ptr, table_stride, num_decodes, width, max_splits, num_records,
    num_tokens,
    qk_scale, v_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr,
    KV_BLOCK: tl.constexpr, KV_TOKEN: tl.constexpr, KV_HEAD: tl.constexpr,
    FP8: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend over one item for one kv head: a decode row's splits, or a chunk row's query tile.

    The first num_decodes * width items are decode rows; with width > 1 item i takes every width-th
    split of row i // width, counted from the first that it reads, and writes partials
    [num_decodes, max_splits, Hq, DIM] and sums [2, num_decodes, max_splits, Hq] (maxima, then
    sums). The others are the tiles of
    prefill_plan_kernel's records; items after those write zeros to the query rows that belong to no
    sequence.

    q [T, Hq, D] with strides Q_TOKEN, Q_HEAD; k, v: strides KV_* in loaded elements, which are
    int16 pairs where FP8; out [T, Hq, D] contiguous; sinks [Hq] or None. qk_scale is the
    `score_scale`, and where FP8 both scales hold the 2**8 of the pairs. WINDOW, SOFTCAP: 0 if the
    layer has none. TILE divides BLOCK_SIZE or BLOCK_SIZE divides TILE; TILE
    divides SPLIT.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    WIDTH: tl.constexpr = HEAD_DIM // 2 if FP8 else HEAD_DIM
    WIDE: tl.constexpr = DIM // 2 if FP8 else DIM
    wait_for_previous(PDL)
    item = tl.program_id(0)
    head = tl.program_id(1)
    rank = item - num_decodes * width
    is_decode = rank < 0
    row = item // width
    stored = (rank >= 0) & (rank < num_records)
    record = records_ptr + (rank + 1) * 8
    table_row = tl.load(record, mask=stored, other=0)
    query = tl.load(record + 1, mask=stored, other=0)
    num_queries = tl.load(record + 2, mask=stored, other=0)
    seen = tl.load(record + 3, mask=stored, other=0)  # keys that the first token sees
    num_tiles = tl.load(records_ptr, mask=rank >= 0, other=0)
    if rank >= num_tiles:
        query = rank * TOKENS
        query += tl.load(records_ptr + 1, mask=rank >= 0, other=0) - num_tiles * TOKENS
        num_queries = tl.minimum(num_tokens - query, TOKENS)
        table_row = 0
        seen = -BLOCK_M
    if is_decode:
        table_row = row
        query = row
        num_queries = 1
        seen = tl.load(context_lens_ptr + row)
    if num_queries <= 0:
        return
    member = tl.arange(0, BLOCK_M)
    token = member // GROUP
    column = tl.arange(0, DIM)
    lane = tl.arange(0, WIDE)
    real = (token < num_queries) & (token < TOKENS)
    q_row = q_ptr + query.to(tl.int64) * Q_TOKEN + head * (GROUP * Q_HEAD)
    q_row += (token * Q_TOKEN + (member % GROUP) * Q_HEAD)[:, None]
    if FP8:
        inside = real[:, None] & (lane < WIDTH)[None, :]
        q0 = tl.load(q_row + 2 * lane[None, :], mask=inside, other=0.0).to(tl.float16)
        q1 = tl.load(q_row + 2 * lane[None, :] + 1, mask=inside, other=0.0).to(tl.float16)
    else:
        inside = real[:, None] & (column < HEAD_DIM)[None, :]
        q0 = tl.load(q_row + column[None, :], mask=inside, other=0.0)
    table = block_tables_ptr + table_row.to(tl.int64) * table_stride
    visible = seen + tl.minimum(token, num_queries - 1)  # keys each row sees
    limit = tl.maximum(seen + num_queries - 1, 0)
    end = tl.cdiv(limit, TILE)
    position = tl.arange(0, TILE)
    spots = (position * KV_TOKEN)[:, None] + lane[None, :] + head * KV_HEAD
    spread = is_decode & (width > 1)
    first = tl.where(spread, item % width, 0)
    step = tl.where(spread, width, 1)
    all_top = tl.full([BLOCK_M], LOWEST, tl.float32)
    all_total = tl.zeros([BLOCK_M], tl.float32)
    all_acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    num_heads = tl.num_programs(1) * GROUP
    factor = score_factor(qk_scale, SOFTCAP)
    first_key = 0
    first_split = 0
    if WINDOW > 0:
        first_key = tl.maximum(seen - WINDOW, 0)
        first_split = first_key // SPLIT
        first += first_split
    for split in range(first, tl.cdiv(limit, SPLIT), step):
        top = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc0 = tl.zeros([BLOCK_M, WIDE], tl.float32)
        acc1 = tl.zeros([BLOCK_M, WIDE], tl.float32)
        from_tile = split * (SPLIT // TILE)
        to_tile = tl.minimum(from_tile + SPLIT // TILE, end)
        if WINDOW > 0:
            from_tile = tl.maximum(from_tile, first_key // TILE)
        block = tl.load(table + (from_tile * TILE) // BLOCK_SIZE)
        for tile in tl.range(from_tile, to_tile, num_stages=STAGES):
            key = tile * TILE + position
            read = key < limit
            if WINDOW > 0:
                read = read & (key >= first_key)
            loaded = read[:, None] & (lane < WIDTH)[None, :]
            if BLOCK_SIZE >= TILE:
                base = block.to(tl.int64) * KV_BLOCK + ((tile * TILE) % BLOCK_SIZE) * KV_TOKEN
                k = tl.load(k_ptr + base + spots, mask=loaded, other=0)
                v = tl.load(v_ptr + base + spots, mask=loaded, other=0)
                block = tl.load(table + (tl.minimum(tile + 1, to_tile - 1) * TILE) // BLOCK_SIZE)
            else:
                blocks = tl.load(table + key // BLOCK_SIZE, mask=read, other=0)
                base = blocks.to(tl.int64) * KV_BLOCK + (
                    (position % BLOCK_SIZE) * KV_TOKEN + head * KV_HEAD
                )
                k = tl.load(k_ptr + base[:, None] + lane[None, :], mask=loaded, other=0)
                v = tl.load(v_ptr + base[:, None] + lane[None, :], mask=loaded, other=0)
            if FP8:
                scores = tl.dot(q0, even_fp8(k).T)
                scores = tl.dot(q1, odd_fp8(k).T, scores)
            else:
                scores = tl.dot(q0, k.T, input_precision="ieee")
            if SOFTCAP > 0:
                scores = soft_cap(scores, qk_scale)
            shown = key[None, :] < visible[:, None]
            if WINDOW > 0:
                shown = shown & (key[None, :] >= visible[:, None] - WINDOW)
            scores = tl.where(shown, scores, LOWEST)
            new_top = tl.maximum(top, tl.max(scores, 1) * factor)
            fade = tl.exp2(top - new_top)
            p = tl.exp2(tl.fma(scores, factor, -tl.broadcast_to(new_top[:, None], scores.shape)))
            p = tl.where(shown, p, 0.0)
            total = tl.fma(total, fade, tl.sum(p, 1))
            if FP8:
                acc0 = tl.dot(p.to(tl.float16), even_fp8(v), acc0 * fade[:, None])
                acc1 = tl.dot(p.to(tl.float16), odd_fp8(v), acc1 * fade[:, None])
            else:
                acc0 = tl.dot(p.to(v.dtype), v, acc0 * fade[:, None], input_precision="ieee")
            top = new_top
        if FP8:
            acc = tl.interleave(acc0, acc1)
        else:
            acc = acc0
        if spread:
            place = (row * max_splits + split - first_split).to(tl.int64)
            place = place * num_heads + head * GROUP + member
            sums_at = sums_ptr + place
            tl.store(sums_at, top, mask=real)
            sums_at += num_decodes.to(tl.int64) * max_splits * num_heads
            tl.store(sums_at, total, mask=real)
            tl.store(partials_ptr + place[:, None] * DIM + column[None, :], acc, mask=real[:, None])
        else:
            all_top, all_total, all_acc = merge(all_top, all_total, all_acc, top, total, acc)
    if spread:
        return
    if sinks_ptr is not None:
        sinks = load_sinks(sinks_ptr, head, member % GROUP, GROUP)
        all_top, all_total, all_acc = add_sinks(all_top, all_total, all_acc, sinks)
    spot = token * (num_heads * HEAD_DIM) + (member % GROUP) * HEAD_DIM
    out_row = out_ptr + query.to(tl.int64) * (num_heads * HEAD_DIM) + head * (GROUP * HEAD_DIM)
    value = normalised(all_total, all_acc, v_scale).to(out_ptr.dtype.element_ty)
    keep = real[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(out_row + spot[:, None] + column[None, :], value, mask=keep)


@triton.jit(do_not_specialize=["num_decodes", "max_splits"])
def merge_splits_kernel(
    context_lens_ptr, partials_ptr, sums_ptr, sinks_ptr, out_ptr, num_decodes, max_splits, v_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one decode row and kv head, in order."""
    MEMBERS: tl.constexpr = triton.next_power_of_2(GROUP)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    member = tl.arange(0, MEMBERS)
    column = tl.arange(0, DIM)
    num_heads = tl.num_programs(1) * GROUP
    real = member < GROUP
    top = tl.full([MEMBERS], LOWEST, tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    acc = tl.zeros([MEMBERS, DIM], tl.float32)
    plane = num_decodes.to(tl.int64) * max_splits * num_heads
    length = tl.load(context_lens_ptr + row)
    num_splits = tl.cdiv(length, SPLIT)
    if WINDOW > 0:
        num_splits -= tl.maximum(length - WINDOW, 0) // SPLIT
    for split in tl.range(0, num_splits, num_stages=3):
        place = (row * max_splits + split).to(tl.int64) * num_heads + head * GROUP + member
        new_top = tl.load(sums_ptr + place, mask=real, other=LOWEST)
        new_total = tl.load(sums_ptr + plane + place, mask=real, other=0.0)
        part = place[:, None] * DIM + column[None, :]
        new_acc = tl.load(partials_ptr + part, mask=real[:, None], other=0.0)
        top, total, acc = merge(top, total, acc, new_top, new_total, new_acc)
    if sinks_ptr is not None:
        top, total, acc = add_sinks(top, total, acc, load_sinks(sinks_ptr, head, member, GROUP))
    spot = (row * num_heads + head * GROUP + member)[:, None] * HEAD_DIM + column[None, :]
    keep = real[:, None] & (column < HEAD_DIM)[None, :]
    value = normalised(total, acc, v_scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + spot, value, mask=keep)
