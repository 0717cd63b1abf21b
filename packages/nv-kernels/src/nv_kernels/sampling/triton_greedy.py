"""The highest logit of each row, in one pass.

Owns the two kernels for a batch in which every row is greedy.
"""

from __future__ import annotations

import triton
import triton.language as tl

gdc_launch = tl.extra.cuda.gdc_launch_dependents
gdc_wait = tl.extra.cuda.gdc_wait

NONE = tl.constexpr(-float("inf"))
INFINITE = tl.constexpr(float("inf"))
LAST = tl.constexpr(2147483647)


@triton.jit
def chunk_argmax_kernel(
    logits, best, best_id, stride, V, num_ids, num_chunks, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """Find the highest logit of a chunk and its lowest id; chunks start from the vocabulary's end.

    NaN counts as infinity. num_ids, if given, is the end of the last chunk.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.num_programs(1) - 1 - tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        gdc_launch()
        gdc_wait()
    x = tl.load(
        logits + row * stride + ids, mask=ids < V, other=NONE, eviction_policy="evict_first"
    ).to(tl.float32)
    x = tl.where(x < INFINITE, x, INFINITE)
    if num_ids is not None:
        x = tl.where(ids < num_ids, x, NONE)
    highest, index = tl.max(x, 0, return_indices=True)
    tl.store(best + row * num_chunks + chunk, highest)
    tl.store(best_id + row * num_chunks + chunk, chunk * CHUNK + index)


@triton.jit
def row_argmax_kernel(best, best_id, out, num_chunks, CHUNKS: tl.constexpr, PDL: tl.constexpr):
    """Find the highest logit of a row, with the lowest id on a tie; -1 if it is infinite."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch()
        gdc_wait()
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    values = tl.load(best + row * num_chunks + chunks, mask=inside, other=NONE)
    ids = tl.load(best_id + row * num_chunks + chunks, mask=inside, other=LAST)
    highest = tl.max(values, 0)
    token = tl.min(tl.where(values == highest, ids, LAST), 0)
    is_finite = (highest > NONE) & (highest < INFINITE)
    tl.store(out + row, tl.where(is_finite, token, -1).to(tl.int64))
