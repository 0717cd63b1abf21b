"""Paged attention of one query token a sequence: split keys, packed query heads, one launch.

Owns the decode kernel. Never cuts the work (decode_plan does) and never holds a buffer
(nv_kernels.attention.triton does).

A program takes one record of the plan: some tiles of one (sequence, kv head). The group's query
heads are the rows of a 16-row dot (FlashDecoding's split, Dao et al. 2023; PagedAttention's
blocks, Kwon et al. 2023). A piece that is a whole sequence writes its output; otherwise it leaves
a partial, and the last of the item's pieces to arrive merges them in a fixed order, so results
are bitwise repeatable. Rows of context length 0 get zeros.

Where FUSED, a program also norms and rotates its query heads, straight from the projection, and
the last piece of an item makes the new token's key and value, stores them, and starts its softmax
from them: the loop covers the tokens before it, and nothing depends on a store being seen.

Under programmatic launch everything before the wait reads only the plan, the block table, the
slots, weights, the rotation's table and keys of earlier steps: plan, block table and slots must
be written at least two kernels ahead.
"""

# A kernel is written in Triton's own dialect, which neither tool reads.
# ruff: noqa: ANN001, ANN201, PLR0912, PLR0915, PLR0917, SIM108
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from nv_kernels.triton.decode_merge import LOWEST, merge_partials
from nv_kernels.triton.decode_prologue import (
    as_read,
    load_angles,
    load_weights,
    prefetch_tiles,
    repeat_rows,
    store_new,
    turned_heads,
)
from nv_kernels.triton.fp8_pairs import even_fp8, odd_fp8
from nv_kernels.triton.previous import wait_for_previous
from nv_kernels.triton.rope_store import load_half


@triton.jit(do_not_specialize=["table_stride", "plane"])
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
    table_stride,
    qk_scale,
    v_scale,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    slots_ptr,
    plane,
    eps,
    k_inverse_scale,
    v_inverse_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
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
    FUSED: tl.constexpr,
    NORM: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend over one piece.

    q [rows, Hq, D] with strides Q_TOKEN, Q_HEAD; k, v: strides KV_* in loaded elements, which are
    int16 pairs where FP8; out [rows, Hq, D] contiguous. qk_scale holds log2(e), and where FP8 both
    scales hold the 2**8 of the pairs. DIM: HEAD_DIM rounded up to a power of two. PAGE is a
    multiple of TILE, or divides it. MERGE partials are merged at a time. sums holds the
    base-2 logarithms of the partials' softmax sums.

    Where FUSED, q is the projection [P, rows, (Hq + 2 Hkv) * D] with strides plane and Q_TOKEN, as
    rope_store_kernel's x. EARLY: a piece's first tile is loaded before the wait.
    """
    ROWS: tl.constexpr = 16
    WIDTH: tl.constexpr = HEAD_DIM // 2 if FP8 else HEAD_DIM  # of a key, in loaded elements
    WIDE: tl.constexpr = DIM // 2 if FP8 else DIM
    record = records_ptr + tl.program_id(0) * 8
    item = tl.load(record)
    first_tile = tl.load(record + 1)
    num_tiles = tl.load(record + 2)
    length = tl.load(record + 3)
    block = tl.load(record + 4)
    next_block = tl.load(record + 5)
    first_slot = tl.load(record + 6)
    pieces = tl.load(record + 7)
    row = tl.maximum(item, 0) // NUM_KV_HEADS
    head = tl.maximum(item, 0) % NUM_KV_HEADS
    end_tile = first_tile + num_tiles
    seen = length  # tokens that the loop covers
    if FUSED:  # a spare record's length is stale
        seen = tl.maximum(tl.where(item < 0, 0, length) - 1, 0)
        end_tile = tl.minimum(end_tile, tl.cdiv(seen, TILE))
    table = block_tables_ptr + row.to(tl.int64) * table_stride
    token = tl.arange(0, TILE)
    column = tl.arange(0, DIM)
    lane = tl.arange(0, WIDE)
    member = tl.arange(0, ROWS)
    if PREFETCH > 0:
        prefetch_tiles(
            k_ptr + head * KV_HEAD, v_ptr + head * KV_HEAD, table, first_tile, num_tiles, seen,
            block, next_block, PREFETCH, TILE, PAGE, WIDTH, KV_BLOCK, KV_TOKEN,
        )  # fmt: skip
    if FUSED:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        cos, sin = load_angles(cos_sin_ptr, seen, HEAD_DIM, DIM, dtype)
        q_weight, q_partner_weight = load_weights(q_weight_ptr, NORM, HEAD_DIM, DIM)
        k_weight, k_partner_weight = load_weights(k_weight_ptr, NORM, HEAD_DIM, DIM)
        slot = tl.load(slots_ptr + row).to(tl.int64)
    offsets = (token * KV_TOKEN)[:, None] + lane[None, :] + head * KV_HEAD
    if EARLY:
        early_valid = token < seen - first_tile * TILE
        loaded = early_valid[:, None] & (lane < WIDTH)[None, :]
        if PAGE >= TILE:
            base = block.to(tl.int64) * KV_BLOCK + ((first_tile * TILE) % PAGE) * KV_TOKEN
            early_k = tl.load(k_ptr + base + offsets, mask=loaded, other=0)
            early_v = tl.load(v_ptr + base + offsets, mask=loaded, other=0)
            block = tl.maximum(next_block, 0)
            ahead = tl.maximum(tl.minimum(first_tile + 2, end_tile - 1), 0)
            next_block = tl.load(table + (ahead * TILE) // PAGE, mask=num_tiles > 0, other=0)
        else:
            position = first_tile * TILE + token
            blocks = tl.load(table + position // PAGE, mask=position < seen, other=0)
            base = blocks.to(tl.int64) * KV_BLOCK + ((token % PAGE) * KV_TOKEN + head * KV_HEAD)
            early_k = tl.load(k_ptr + base[:, None] + lane[None, :], mask=loaded, other=0)
            early_v = tl.load(v_ptr + base[:, None] + lane[None, :], mask=loaded, other=0)
        first_tile += 1
    wait_for_previous(PDL)
    if item < 0:
        return
    real = (member < GROUP)[:, None]
    inside = (column < HEAD_DIM)[None, :]
    acc0 = tl.zeros([ROWS, WIDE], tl.float32)
    if FP8:
        acc1 = tl.zeros([ROWS, WIDE], tl.float32)
    top = tl.full([ROWS], LOWEST, tl.float32)
    weights = tl.zeros([ROWS, TILE], tl.float32)  # summed after the loop: no cross-warp sum a tile
    if FUSED:
        MEMBERS: tl.constexpr = triton.next_power_of_2(GROUP)
        is_new = (length > 0) & (pieces % 65536 == pieces // 65536 - 1)
        x_row = q_ptr + row.to(tl.int64) * Q_TOKEN
        sharer = tl.arange(0, MEMBERS)
        own = tl.arange(0, 1)
        q = turned_heads(
            x_row, (head * GROUP + sharer) * HEAD_DIM, sharer < GROUP, plane, q_weight,
            q_partner_weight, cos, sin, eps, NUM_PARTIALS, NORM, HEAD_DIM, DIM, dtype,
        )  # fmt: skip
        key = turned_heads(
            x_row, own + (NUM_KV_HEADS * GROUP + head) * HEAD_DIM, (own == 0) & is_new, plane,
            k_weight, k_partner_weight, cos, sin, eps, NUM_PARTIALS, NORM, HEAD_DIM, DIM, dtype,
        )  # fmt: skip
        v_start = (NUM_KV_HEADS * (GROUP + 1) + head) * HEAD_DIM
        value = load_half(
            x_row, v_start + column[None, :], inside & is_new, plane, NUM_PARTIALS, dtype
        )
        place = (slot // PAGE) * KV_BLOCK + (slot % PAGE) * KV_TOKEN + head * KV_HEAD
        kept = inside & is_new & (slot >= 0)
        store_new(k_ptr, place, key, k_inverse_scale, kept, FP8)
        store_new(v_ptr, place, value, v_inverse_scale, kept, FP8)
        if FP8:
            q = q.to(tl.float16)
            even, odd = tl.split(q.reshape([MEMBERS, WIDE, 2]))
            q0 = repeat_rows(even, MEMBERS, WIDE, ROWS)
            q1 = repeat_rows(odd, MEMBERS, WIDE, ROWS)
        else:
            q0 = repeat_rows(q, MEMBERS, DIM, ROWS)
        score = tl.sum(q.to(tl.float32) * as_read(key, k_inverse_scale, FP8), 1)  # [MEMBERS]
        score = repeat_rows(score[:, None], MEMBERS, 1, ROWS).reshape([ROWS])
        top = tl.where(is_new, score * qk_scale, LOWEST)
        weights += tl.where(is_new & (token == 0), 1.0, 0.0)[None, :]
        value = as_read(value, v_inverse_scale, FP8)  # 0 where not new
        if FP8:
            even, odd = tl.split(value.reshape([1, WIDE, 2]))
            acc0 += even
            acc1 += odd
        else:
            acc0 += value
    else:
        q_row = q_ptr + row * Q_TOKEN + (head * GROUP + member)[:, None] * Q_HEAD
        if FP8:
            pair = q_row + 2 * lane[None, :]
            mask = real & (lane < WIDTH)[None, :]
            q0 = tl.load(pair, mask=mask, other=0.0).to(tl.float16)
            q1 = tl.load(pair + 1, mask=mask, other=0.0).to(tl.float16)
        else:
            q0 = tl.load(q_row + column[None, :], mask=real & inside, other=0.0)
    if EARLY:
        if FP8:
            scores = tl.dot(q0, even_fp8(early_k).T)
            scores = tl.dot(q1, odd_fp8(early_k).T, scores)
        else:
            scores = tl.dot(q0, early_k.T)
        top, weights, p, fade = soften(scores, early_valid, qk_scale, top, weights)
        if FP8:
            acc0 = tl.dot(p.to(tl.float16), even_fp8(early_v), acc0 * fade)
            acc1 = tl.dot(p.to(tl.float16), odd_fp8(early_v), acc1 * fade)
        else:
            acc0 = tl.dot(p.to(early_v.dtype), early_v, acc0 * fade)
    if PAGE < TILE:
        position = first_tile * TILE + token
        blocks = tl.load(table + position // PAGE, mask=position < seen, other=0)
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        valid = token < seen - tile * TILE
        # Masked loads, not only masked scores: 820 tokens are 1.5 % less than 13 tiles of 64.
        loaded = valid[:, None] & (lane < WIDTH)[None, :]
        if PAGE >= TILE:
            base = block.to(tl.int64) * KV_BLOCK + ((tile * TILE) % PAGE) * KV_TOKEN
            k = tl.load(k_ptr + base + offsets, mask=loaded, other=0)
            v = tl.load(v_ptr + base + offsets, mask=loaded, other=0)
            # Block numbers run two tiles ahead. Triton 3.6 does not pipeline a loop that yields
            # a carried value as it came, hence the maximum.
            block = tl.maximum(next_block, 0)
            next_block = tl.load(table + (tl.minimum(tile + 2, end_tile - 1) * TILE) // PAGE)
        else:
            base = blocks.to(tl.int64) * KV_BLOCK + ((token % PAGE) * KV_TOKEN + head * KV_HEAD)
            k = tl.load(k_ptr + base[:, None] + lane[None, :], mask=loaded, other=0)
            v = tl.load(v_ptr + base[:, None] + lane[None, :], mask=loaded, other=0)
            position = tl.minimum(tile + 1, end_tile - 1) * TILE + token
            blocks = tl.load(table + position // PAGE, mask=position < seen, other=0)
        if FP8:
            scores = tl.dot(q0, even_fp8(k).T)
            scores = tl.dot(q1, odd_fp8(k).T, scores)
        else:
            scores = tl.dot(q0, k.T)
        top, weights, p, fade = soften(scores, valid, qk_scale, top, weights)
        if FP8:
            acc0 = tl.dot(p.to(tl.float16), even_fp8(v), acc0 * fade)
            acc1 = tl.dot(p.to(tl.float16), odd_fp8(v), acc1 * fade)
        else:
            acc0 = tl.dot(p.to(v.dtype), v, acc0 * fade)
    total = tl.sum(weights, 1)
    total = tl.where(total > 0.0, total, 1.0)  # an empty row: zeros
    share = (v_scale / total)[:, None]
    if FP8:
        acc = tl.interleave(acc0 * share, acc1 * share)
    else:
        acc = acc0 * share
    num_pieces = pieces // 65536
    out_row = out_ptr + (row * NUM_KV_HEADS + head) * (GROUP * HEAD_DIM)
    if num_pieces == 1:
        spot = member[:, None] * HEAD_DIM + column[None, :]
        tl.store(out_row + spot, acc.to(out_ptr.dtype.element_ty), mask=real & inside)
    else:
        mine = first_slot + pieces % 65536
        tl.store(sums_ptr + mine * GROUP + member, top + tl.log2(total), mask=member < GROUP)
        part = (mine * GROUP + member)[:, None] * DIM + column[None, :]
        tl.store(partials_ptr + part, acc, mask=real)
        tl.debug_barrier()  # all warps' stores come before the one thread's release
        arrived = tl.atomic_add(counters_ptr + first_slot, 1, sem="acq_rel", scope="gpu")
        if arrived == num_pieces - 1:
            merge_partials(
                partials_ptr, sums_ptr, out_row, first_slot, num_pieces, GROUP, HEAD_DIM, DIM, MERGE
            )
            tl.store(counters_ptr + first_slot, 0)  # ready for the next layer


@triton.jit
def soften(scores, valid, qk_scale, top, weights):
    """Take a tile into the online softmax: the new top and weights, the tile's p, what fades."""
    scores = tl.where(valid[None, :], scores, LOWEST)
    new_top = tl.maximum(top, tl.max(scores, 1) * qk_scale)
    p = tl.exp2(scores * qk_scale - new_top[:, None])
    fade = tl.exp2(top - new_top)[:, None]
    return new_top, weights * fade + p, p, fade
