"""Paged causal attention of chunks: several query tokens per sequence, with cached context.

Owns the chunk kernel. `prefill_plan` orders the tiles.

A program computes one query tile of the plan for one kv head. The rows of its dots are tokens times
the group's query heads, so that short chunks fill them too and few blocks lie on the diagonal.
Online softmax in base 2 (FlashAttention-2, Dao 2023). Blocks that every row reads in full run
first, unmasked, then those in which the window of some row begins, and those on the diagonal. The
grid is (tiles, kv heads), bounded by the number of tokens and sequences; programs after the plan's
tiles write zeros to the query rows that belong to no sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nv_kernels.attention.triton.scores import load_sinks, score_factor, soft_cap
from nv_kernels.cache.triton_fp8 import even_fp8, odd_fp8
from nv_kernels.launch.triton_previous import wait_for_previous

LOWEST = tl.constexpr(-1.0e30)  # in place of -inf: differences stay finite
# Below every real score and far above LOWEST: a row that reads no key of a block gives that block
# weight 0. (With LOWEST as the maximum, the rounding of LOWEST * scale would decide.)
FLOOR = tl.constexpr(-1.0e20)


@triton.jit(do_not_specialize=["table_stride", "num_records", "num_tokens"])
def prefill_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    block_tables_ptr,
    out_ptr,
    records_ptr,
    table_stride,
    num_records,
    num_tokens,
    qk_scale,
    v_scale,
    sinks_ptr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    KV_TOKEN: tl.constexpr,
    KV_HEAD: tl.constexpr,
    FP8: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend over one tile of BLOCK_M // GROUP query tokens for one kv head.

    q [T, Hq, D] with strides Q_TOKEN, Q_HEAD; k, v: strides KV_* in loaded elements, which are
    int16 pairs where FP8; out [T, Hq, D] contiguous; sinks [Hq] or None. qk_scale is the
    `score_scale`, and where FP8 both scales hold the 2**8 of the pairs. WINDOW, SOFTCAP: 0 if the
    layer has none. BLOCK_N divides BLOCK_SIZE, or BLOCK_SIZE divides BLOCK_N.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    WIDTH: tl.constexpr = HEAD_DIM // 2 if FP8 else HEAD_DIM
    WIDE: tl.constexpr = DIM // 2 if FP8 else DIM
    wait_for_previous(PDL)
    rank = tl.program_id(0)
    head = tl.program_id(1)
    num_tiles = tl.load(records_ptr)
    num_used = tl.load(records_ptr + 1)
    record = records_ptr + (rank + 1) * 8
    stored = rank < num_records
    table_row = tl.load(record, mask=stored, other=0)
    query = tl.load(record + 1, mask=stored, other=0)
    num_queries = tl.load(record + 2, mask=stored, other=0)
    seen = tl.load(record + 3, mask=stored, other=0)  # keys that the first token sees
    if rank >= num_tiles:
        query = num_used + (rank - num_tiles) * TOKENS
        num_queries = tl.minimum(num_tokens - query, TOKENS)
        table_row = 0
        seen = -BLOCK_M
    if num_queries <= 0:
        return
    member = tl.arange(0, BLOCK_M)
    token = member // GROUP
    column = tl.arange(0, DIM)
    lane = tl.arange(0, WIDE)
    real = token < num_queries
    if BLOCK_M % GROUP != 0:
        real = real & (token < TOKENS)
    q_row = q_ptr + query.to(tl.int64) * Q_TOKEN + head * (GROUP * Q_HEAD)
    q_row += (token * Q_TOKEN + (member % GROUP) * Q_HEAD)[:, None]
    if FP8:
        inside = real[:, None] & (lane < WIDTH)[None, :]
        q0 = tl.load(q_row + 2 * lane[None, :], mask=inside, other=0.0).to(tl.float16)
        q1 = tl.load(q_row + 2 * lane[None, :] + 1, mask=inside, other=0.0).to(tl.float16)
    else:
        inside = real[:, None] & (column < HEAD_DIM)[None, :]
        q0 = tl.load(q_row + column[None, :], mask=inside, other=0.0)
        q1 = q0
    acc0 = tl.zeros([BLOCK_M, WIDE], tl.float32)
    acc1 = tl.zeros([BLOCK_M, WIDE if FP8 else 1], tl.float32)
    if sinks_ptr is None:
        top = tl.full([BLOCK_M], FLOOR if WINDOW > 0 else LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    else:
        top = load_sinks(sinks_ptr, head, member % GROUP, GROUP)
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    factor = score_factor(qk_scale, SOFTCAP)
    table = block_tables_ptr + table_row.to(tl.int64) * table_stride
    visible = seen + tl.minimum(token, num_queries - 1)  # keys each row sees
    limit = seen + num_queries - 1
    clear = tl.maximum(seen, 0) // BLOCK_N  # blocks that every row sees in full
    end = tl.cdiv(tl.maximum(limit, 0), BLOCK_N)
    position = tl.arange(0, BLOCK_N)
    spots = (position * KV_TOKEN)[:, None] + lane[None, :] + head * KV_HEAD
    last = tl.maximum(end - 1, 0)
    # Blocks whole_from to clear - 1 are read in full by every row. Masked are those after them, and
    # with a window those before them, from the one of the first row's first key on.
    whole_from = 0
    masked_from = clear
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(seen - WINDOW, 0)
        whole_from = tl.minimum(tl.cdiv(tl.maximum(limit - WINDOW, 0), BLOCK_N), clear)
        masked_from = first_key // BLOCK_N + clear - whole_from

    block = tl.load(table + (whole_from * BLOCK_N) // BLOCK_SIZE)
    for step in tl.range(whole_from, clear, num_stages=STAGES):
        if BLOCK_SIZE >= BLOCK_N:
            base = block.to(tl.int64) * KV_BLOCK + ((step * BLOCK_N) % BLOCK_SIZE) * KV_TOKEN
            k = tl.load(k_ptr + base + spots, mask=(lane < WIDTH)[None, :], other=0)
            v = tl.load(v_ptr + base + spots, mask=(lane < WIDTH)[None, :], other=0)
            block = tl.load(table + (tl.minimum(step + 1, last) * BLOCK_N) // BLOCK_SIZE)
        else:
            blocks = tl.load(table + (step * BLOCK_N + position) // BLOCK_SIZE)
            base = blocks.to(tl.int64) * KV_BLOCK + (
                (position % BLOCK_SIZE) * KV_TOKEN + head * KV_HEAD
            )
            k = tl.load(
                k_ptr + base[:, None] + lane[None, :], mask=(lane < WIDTH)[None, :], other=0
            )
            v = tl.load(
                v_ptr + base[:, None] + lane[None, :], mask=(lane < WIDTH)[None, :], other=0
            )
        scores = query_key(q0, q1, k, FP8)
        if SOFTCAP > 0:
            scores = soft_cap(scores, qk_scale)
        top, fade, p = online_softmax(scores, top, factor)
        total = total * fade + tl.sum(p, 1)
        acc0, acc1 = weighted_values(p, v, acc0, acc1, fade, FP8)
    for turn in tl.range(masked_from, end, num_stages=STAGES):
        step = turn
        if WINDOW > 0:
            step = tl.where(turn < clear, turn - (clear - whole_from), turn)
        key = step * BLOCK_N + position
        read = key < limit  # by some row: undefined values times 0 may be NaN
        if WINDOW > 0:
            read = read & (key >= first_key)
        loaded = read[:, None] & (lane < WIDTH)[None, :]
        if BLOCK_SIZE >= BLOCK_N:
            block = tl.load(table + (step * BLOCK_N) // BLOCK_SIZE)
            base = block.to(tl.int64) * KV_BLOCK + ((step * BLOCK_N) % BLOCK_SIZE) * KV_TOKEN
            k = tl.load(k_ptr + base + spots, mask=loaded, other=0)
            v = tl.load(v_ptr + base + spots, mask=loaded, other=0)
        else:
            blocks = tl.load(table + key // BLOCK_SIZE, mask=read, other=0)
            base = blocks.to(tl.int64) * KV_BLOCK + (
                (position % BLOCK_SIZE) * KV_TOKEN + head * KV_HEAD
            )
            k = tl.load(k_ptr + base[:, None] + lane[None, :], mask=loaded, other=0)
            v = tl.load(v_ptr + base[:, None] + lane[None, :], mask=loaded, other=0)
        scores = query_key(q0, q1, k, FP8)
        if SOFTCAP > 0:
            scores = soft_cap(scores, qk_scale)
        scores = tl.where(key[None, :] < visible[:, None], scores, LOWEST)
        if WINDOW > 0:
            scores = tl.where(key[None, :] >= visible[:, None] - WINDOW, scores, LOWEST)
        top, fade, p = online_softmax(scores, top, factor)
        total = total * fade + tl.sum(p, 1)
        acc0, acc1 = weighted_values(p, v, acc0, acc1, fade, FP8)
    share = (v_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    if FP8:
        acc = tl.interleave(acc0 * share, acc1 * share)
    else:
        acc = acc0 * share
    OUT_HEADS: tl.constexpr = GROUP * HEAD_DIM
    out_token = tl.num_programs(1) * OUT_HEADS
    out_row = out_ptr + query.to(tl.int64) * out_token + head * OUT_HEADS
    spot = token * out_token + (member % GROUP) * HEAD_DIM
    keep = real[:, None] & (column < HEAD_DIM)[None, :]
    value = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_row + spot[:, None] + column[None, :], value, mask=keep)


@triton.jit
def query_key(q0, q1, k, FP8: tl.constexpr):
    """Score queries [M, D] (even and odd columns where FP8) against keys [N, D]."""
    if FP8:
        scores = tl.dot(q0, even_fp8(k).T)
        scores = tl.dot(q1, odd_fp8(k).T, scores)
    else:
        scores = tl.dot(q0, k.T)
    return scores


@triton.jit
def online_softmax(scores, top, qk_scale):
    """Return the new row maxima, the factor for the previous sums, and the weights."""
    new_top = tl.maximum(top, tl.max(scores, 1) * qk_scale)
    weights = tl.exp2(scores * qk_scale - new_top[:, None])
    return new_top, tl.exp2(top - new_top), weights


@triton.jit
def weighted_values(p, v, acc0, acc1, fade, FP8: tl.constexpr):
    """Rescale the accumulators and add weights [M, N] times values [N, D]."""
    if FP8:
        acc0 = tl.dot(p.to(tl.float16), even_fp8(v), acc0 * fade[:, None])
        acc1 = tl.dot(p.to(tl.float16), odd_fp8(v), acc1 * fade[:, None])
    else:
        acc0 = tl.dot(p.to(v.dtype), v, acc0 * fade[:, None])
    return acc0, acc1
