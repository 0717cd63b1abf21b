"""The loads of the Hopper chunk kernel: items, blocks of keys and values, queries.

Owns the loading warp and its queue of items (a tile and a kv head). The two warp groups of `hopper`
compute.
"""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

HALF = gl.constexpr(64)  # rows of a computing warp group


@gluon.jit
def read_item(records_ptr, num_tiles, num_items, item):
    """Read an item's record. Items go head by head, so that keys stay in L2, the longest first."""
    there = item < num_items
    head = item // num_tiles
    record = records_ptr + (item % num_tiles + 1) * 8
    row = gl.load(record, mask=there, other=0)
    query = gl.load(record + 1, mask=there, other=0)
    num_queries = gl.load(record + 2, mask=there, other=0)
    seen = gl.load(record + 3, mask=there, other=0)  # keys that the first token sees
    context = gl.load(record + 4, mask=there, other=0)
    return head, row, query, num_queries, seen, context


@gluon.jit
def hand_out(items, item_full, item_empty, turn, item):
    """Pass the item of a turn to both computing groups."""
    side = turn % 2
    mbarrier.wait(item_empty.index(side), ((turn // 2) & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    items.index(side).store(gl.full([1], item, gl.int32, layout))
    gl.thread_barrier()
    mbarrier.arrive(item_full.index(side), count=1)


@gluon.jit
def take(items, item_full, item_empty, turn):
    """Wait for the item of a turn, and return it."""
    side = turn % 2
    mbarrier.wait(item_full.index(side), (turn // 2) & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    item = gl.max(items.index(side).load(layout), 0)
    gl.thread_barrier()
    mbarrier.arrive(item_empty.index(side), count=1)
    return item


@gluon.jit
def load_blocks(
    k_desc, v_desc, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, items, item_full,
    item_empty, records_ptr, num_tiles, num_items, block_tables_ptr, table_stride,
    BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Take items until none is left, and load the blocks of each, the last first.

    It takes the next item before it loads this one's blocks: the computing groups prepare for it.
    """
    programs = gl.num_programs(0)
    count = gl.to_tensor(0)  # blocks loaded
    turn = gl.to_tensor(0)
    item = gl.program_id(0)
    hand_out(items, item_full, item_empty, turn, item)
    while item < num_items:
        next_item = programs + gl.atomic_add(records_ptr + 2, 1, sem="relaxed")
        turn += 1
        hand_out(items, item_full, item_empty, turn, next_item)
        head, row, _, num_queries, seen, _ = read_item(records_ptr, num_tiles, num_items, item)
        table = block_tables_ptr + row.to(gl.int64) * table_stride
        end = gl.cdiv(seen + num_queries - 1, BLOCK_N)
        for index in range(end):
            first = (end - 1 - index) * BLOCK_N
            block = gl.load(table + first // BLOCK_SIZE)
            stage = count % STAGES
            phase = ((count // STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc,
                [block, head, first % BLOCK_SIZE, 0],
                k_full.index(stage),
                k_tiles.index(stage),
            )
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_desc,
                [block, head, first % BLOCK_SIZE, 0],
                v_full.index(stage),
                v_tiles.index(stage),
            )
            count += 1
        item = next_item
    # The last program that finds the queue empty resets the counters for the next launch.
    if gl.atomic_add(records_ptr + 3, 1, sem="acq_rel") == programs - 1:
        gl.store(records_ptr + 2, 0)
        gl.store(records_ptr + 3, 0)


@gluon.jit
def load_queries(
    q_ptr, which, head, query, num_queries, layout: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, Q_TOKEN: gl.constexpr, Q_HEAD: gl.constexpr,
):  # fmt: skip
    """[64, D]: row r is token (which * 64 + r) // GROUP of the tile, and a head of the group."""
    member = which * HALF + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    token = member // GROUP
    real = token < gl.minimum(num_queries, 2 * HALF // GROUP)
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    spot = token * Q_TOKEN + (head * GROUP + member % GROUP) * Q_HEAD
    spots = gl.expand_dims(spot, 1) + gl.expand_dims(column, 0)
    start = q_ptr + query.to(gl.int64) * Q_TOKEN
    return gl.load(start + spots, mask=gl.expand_dims(real, 1), other=0.0)


@gluon.jit
def write_zeros(out_ptr, first, num_tokens, out_token: gl.constexpr):
    """Write zeros to the query rows that belong to no sequence, 512 elements at a time."""
    lane = gl.arange(0, 512, gl.BlockedLayout([4], [32], [4], [0]))
    zeros = gl.zeros([512], out_ptr.dtype.element_ty, gl.BlockedLayout([4], [32], [4], [0]))
    for token in range(first + gl.program_id(0), num_tokens, gl.num_programs(0)):
        for start in range(0, out_token, 512):
            spot = token.to(gl.int64) * out_token + start + lane
            gl.store(out_ptr + spot, zeros, mask=start + lane < out_token)
