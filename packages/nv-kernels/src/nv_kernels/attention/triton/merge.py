"""Merges the partial results of one item, a sequence and kv head.

The program that finishes last merges, in the fixed order of the pieces, so that the result does not
depend on which program that is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nv_kernels.attention.triton.scores import load_sinks

LOWEST = tl.constexpr(-1.0e30)  # in place of -inf: differences stay finite


@triton.jit
def merge_partials(
    partials_ptr,
    sums_ptr,
    out_row,
    first_part,
    num_pieces,
    sinks_ptr,
    head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Merge the partials of one item in order, MERGE at a time, and write its output.

    sinks [Hq] or None: a sink is a partial before the others, with a sum of 1 and no values.
    """
    MEMBERS: tl.constexpr = triton.next_power_of_2(GROUP)
    member = tl.arange(0, MEMBERS)
    column = tl.arange(0, DIM)
    if sinks_ptr is None:
        top = tl.full([MEMBERS], LOWEST, tl.float32)
        total = tl.zeros([MEMBERS], tl.float32)
    else:
        top = load_sinks(sinks_ptr, head, member, GROUP)
        total = tl.full([MEMBERS], 1.0, tl.float32)
    acc = tl.zeros([MEMBERS, DIM], tl.float32)
    for start in tl.range(0, num_pieces, MERGE, num_stages=1):
        piece = start + tl.arange(0, MERGE)
        partial = (first_part + piece)[:, None] * GROUP + member[None, :]
        there = (piece < num_pieces)[:, None] & (member < GROUP)[None, :]
        sums = tl.load(sums_ptr + partial, mask=there, other=LOWEST, cache_modifier=".cg")
        part = tl.load(
            partials_ptr + partial[:, :, None] * DIM + column[None, None, :],
            mask=there[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(sums, 0))
        weight = tl.exp2(sums - new_top[None, :])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weight, 0)
        acc = acc * fade[:, None] + tl.sum(part.to(tl.float32) * weight[:, :, None], 0)
        top = new_top
    spot = member[:, None] * HEAD_DIM + column[None, :]
    keep = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    result = acc / tl.maximum(total, 1.0e-30)[:, None]
    tl.store(out_row + spot, result.to(out_row.dtype.element_ty), mask=keep)
