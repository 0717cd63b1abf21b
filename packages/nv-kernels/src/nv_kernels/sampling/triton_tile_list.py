"""A list of a row's tiles, in order: device functions that read their logits and store results.

tl.store and tl.atomic_add would move pointers and values through shared memory into another layout;
`store_each` and `count_each` do not move them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nv_kernels.sampling.triton_draw import NONE

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def list_tiles(list_ptr, keep, TILES: tl.constexpr):
    """Write the numbers of the kept tiles in order; return how many there are.

    Threads that read the previous list must have passed a barrier since.
    """
    kept = keep.to(tl.int32)
    tl.store(list_ptr + tl.cumsum(kept, 0) - 1, tl.arange(0, TILES), mask=keep)
    tl.debug_barrier()
    return tl.sum(kept, 0)


@triton.jit
def load_listed(line, list_ptr, start, end, V, num_ids, STEP: tl.constexpr, TILE: tl.constexpr):
    """Load STEP tiles from place `start` of the list on: (logits [STEP, TILE], tiles, mask).

    A place from `end` on has no tile; its logits are -inf, like those past the vocabulary, or past
    num_ids if given. The load itself is not bounded by num_ids, because V divides into whole loads.
    """
    at = start + tl.arange(0, STEP)
    tiles = tl.load(list_ptr + at, mask=at < end, other=0)
    ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    logits = tl.load(line + ids, mask=(at < end)[:, None] & (ids < V), other=NONE)
    if num_ids is not None:
        none = tl.full((), NONE, tl.float32).to(logits.dtype)
        logits = tl.where(ids < num_ids, logits, none)
    return logits, tiles, at < end


@triton.jit
def store_each(pointers, values, mask):
    """Store fp32 values; all threads that hold the same element store it."""
    if INTERPRETED:
        tl.store(pointers, values, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.f32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,f,r",
            [pointers.to(tl.int64), values, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def count_each(pointers, mask):
    """Add one at each int32 pointer; each element must be held by one thread only."""
    if INTERPRETED:
        tl.atomic_add(pointers, 1, mask=mask, sem="relaxed", scope="cta")
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p red.relaxed.cta.global.add.s32 [$1], 1;"
            " mov.u32 $0, 0; }",
            "=r,l,r",
            [pointers.to(tl.int64), mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
