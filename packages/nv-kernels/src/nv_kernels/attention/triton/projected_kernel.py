"""Attention of one token from its projection: norm of q and k, rope, cache write, in one launch.

Written in Gluon, with products of one warp (`linear.triton.fragments`), because a kernel of a chain
of short ones takes about as long as its instructions after the wait are many.

A program has a kv head and a piece of its keys. A row is a key: row GROUP is the newest one, the
others are the older ones in order. A warp has 16 rows at a time, and loads the first ones before
the wait. The threads of a line hold one query head or, line GROUP, the newest key: so its norm and
rope cost no instruction of their own, and it is where the products need it.

Scores are queries times keys, so that their layout is that which the product by the values needs.
Warps meet in shared memory. Pieces meet as in `decode`: the program that finishes last merges them
in a fixed order, so results are bitwise repeatable.

Before the wait it reads the step's lengths, positions and blocks, and all keys but the newest. The
kernel that writes them must have ended when the previous kernel starts: an embedding is between.
"""

# mypy: disable-error-code="assignment, unreachable, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nv_kernels.launch.triton_previous_gluon import let_next_start, wait_for_previous
from nv_kernels.linear.triton.fragments import (
    along,
    four,
    high_half,
    high_halves,
    low_half,
    low_halves,
    minus,
    multiply,
    pack,
    plus,
    stack,
    times,
)

LOWEST = gl.constexpr(-1.0e30)  # in place of -inf: differences stay finite


@gluon.jit
def _angles(table, eights: gl.constexpr, quads: gl.constexpr, WARPS: gl.constexpr):
    """Load 32 cosines or sines, rounded to words of bf16."""
    at = along(2, 4, eights, 4) * 8 + along(3, 8, eights, 4)
    at = at + along(0, WARPS, eights, 4) * 0 + along(1, 8, eights, 4) * 0
    even, odd = gl.split(gl.load(table + at).reshape([WARPS, 8, 4, 4, 2]))
    return gl.convert_layout(pack(even, odd), quads, assert_trivial=True)


@gluon.jit
def _place(
    table, row, end, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, KV_BLOCK: gl.constexpr,
    KV_TOKEN: gl.constexpr,
):  # fmt: skip
    """Return where a row's older key lies, in words, and whether it is one of the first `end`."""
    position = gl.where(row > GROUP, row - 1, row)
    there = (position < end) & (row != GROUP)
    block = gl.load(table + position // BLOCK_SIZE, mask=there, other=0).to(gl.int64)
    return block * (KV_BLOCK // 2) + position % BLOCK_SIZE * (KV_TOKEN // 2), there


@gluon.jit
def _keys(
    k, table, first, end, column, line, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    KV_BLOCK: gl.constexpr, KV_TOKEN: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """Load a warp's 16 keys: a line's threads have keys `line` and `line + 8`."""
    words = ()
    for half in gl.static_range(2):
        row = first + half * 8 + line
        place, there = _place(table, row, end, GROUP, BLOCK_SIZE, KV_BLOCK, KV_TOKEN)
        for chunk in gl.static_range(CHUNKS):
            at = k + place + column + chunk * 16
            words = words + (gl.load(at, mask=there & (column >= 0), other=0),)
    return words


@gluon.jit
def _values(
    v, table, first, end, pair, dims, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    KV_BLOCK: gl.constexpr, KV_TOKEN: gl.constexpr, SIDES: gl.constexpr,
):  # fmt: skip
    """Load a warp's 16 values: a thread has 8 dims (of each 64) of the 4 rows of its scores."""
    words = ()
    for each in gl.static_range(4):
        row = first + pair * 2 + each % 2 + each // 2 * 8
        place, there = _place(table, row, end, GROUP, BLOCK_SIZE, KV_BLOCK, KV_TOKEN)
        for side in gl.static_range(SIDES):
            at = v + place + dims + side * 32
            words = words + (gl.load(at, mask=there & (dims >= 0), other=0),)
    return words


@gluon.jit
def _spot(member, index, quarter, HEAD_DIM: gl.constexpr):
    """Return the place of a sum in the output: index is (64 dims, one of 8, one of 2)."""
    return member * HEAD_DIM + index // 16 * 64 + (quarter * 2 + index % 2) * 8 + index // 2 % 8


@gluon.jit
def _merge(
    partials, sums, out, item, pieces, GROUP: gl.constexpr, MEMBERS: gl.constexpr,
    HEAD_DIM: gl.constexpr, PIECES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Merge the pieces of an item and write its output."""
    PART: gl.constexpr = 2 if MEMBERS > 1 else 1
    many: gl.constexpr = gl.BlockedLayout(
        [PIECES, 1, 1, 1], [1, 8 // PART, PART, 4], [1, WARPS, 1, 1], [3, 2, 1, 0]
    )
    piece = along(0, PIECES, many, 4)
    index = along(1, HEAD_DIM // 4, many, 4)
    member = along(2, MEMBERS, many, 4)
    spot = _spot(member, index, along(3, 4, many, 4), HEAD_DIM)
    there = (piece < pieces) & (member < GROUP) & (spot >= 0)
    part = (item * PIECES + piece) * GROUP
    logs = gl.load(sums + part + member + spot * 0, mask=there, other=LOWEST, cache_modifier=".cg")
    parts = gl.load(partials + part * HEAD_DIM + spot, mask=there, other=0.0, cache_modifier=".cg")
    weight = gl.exp2(logs - gl.expand_dims(gl.max(logs, 0), 0))
    merged = gl.sum(parts * weight, 0) / gl.sum(weight, 0)
    one: gl.constexpr = gl.SliceLayout(0, many)
    member = along(1, MEMBERS, one, 3)
    spot = _spot(member, along(0, HEAD_DIM // 4, one, 3), along(2, 4, one, 3), HEAD_DIM)
    real = (member < GROUP) & (spot >= 0)
    gl.store(out + item * (GROUP * HEAD_DIM) + spot, merged.to(out.dtype.element_ty), mask=real)


@gluon.jit(do_not_specialize=["table_stride"])
def projected_attention_kernel(
    qkv, q_weight, k_weight, positions, cos_sin, slots, context_lens, block_tables, k, v, out,
    partials, sums, counters, table_stride, eps, qk_scale,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, MEMBERS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, KV_BLOCK: gl.constexpr, KV_TOKEN: gl.constexpr,
    KV_HEAD: gl.constexpr, PIECES: gl.constexpr, WARPS: gl.constexpr,
    NORM: gl.constexpr,
):  # fmt: skip
    """Attend over one piece of one row's keys.

    qkv [rows, (Hq + 2 Hkv) D], out [rows, Hq, D]; k, v: strides KV_* in elements, even. MEMBERS:
    GROUP rounded up to a power of two. A round is 16 rows of each warp. A row has up to PIECES
    pieces, of one round each if that suffices.
    """
    CHUNKS: gl.constexpr = HEAD_DIM // 32
    SIDES: gl.constexpr = HEAD_DIM // 64
    Q_HEADS: gl.constexpr = NUM_KV_HEADS * GROUP
    ROUND: gl.constexpr = WARPS * 16
    lanes: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    quads: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 4], [1, 8, 4, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0]
    )
    eights: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 8], [1, 8, 4, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0]
    )
    piece = gl.program_id(0)
    head = gl.program_id(1)
    row = gl.program_id(2)
    length = gl.load(context_lens + row)
    older = gl.maximum(length - 1, 0)
    used = gl.maximum(length, GROUP + 1)
    size = (used + PIECES * ROUND - 1) // (PIECES * ROUND) * ROUND
    size = gl.maximum(size, ROUND)  # rows of a piece
    pieces = (used + size - 1) // size
    if piece >= pieces:
        wait_for_previous()
        let_next_start()
        return
    line = along(1, 8, quads, 4)
    pair = along(2, 4, quads, 4)
    word = along(3, 4, quads, 4)
    warp = along(0, WARPS, quads, 4)
    column = pair * 4 + word
    dims = line * 4 + word
    words: gl.constexpr = gl.pointer_type(gl.int32)
    table = block_tables + row.to(gl.int64) * table_stride
    k = k.to(words, bitcast=True) + head * (KV_HEAD // 2)
    v = v.to(words, bitcast=True) + head * (KV_HEAD // 2)
    start = piece * size
    first = start + warp * 16
    keys = _keys(
        k, table, first, older, column, line, GROUP, BLOCK_SIZE, KV_BLOCK, KV_TOKEN, CHUNKS
    )
    values = _values(
        v, table, first, older, pair, dims, GROUP, BLOCK_SIZE, KV_BLOCK, KV_TOKEN, SIDES
    )
    is_query = line < GROUP
    angles = cos_sin + gl.load(positions + row).to(gl.int64) * HEAD_DIM
    cosines = ()
    sines = ()
    factors = ()
    for chunk in gl.static_range(CHUNKS // 2):
        cosines = cosines + (_angles(angles + chunk * 32, eights, quads, WARPS),)
        sines = sines + (_angles(angles + HEAD_DIM // 2 + chunk * 32, eights, quads, WARPS),)
    if NORM:
        norm = gl.where(is_query, q_weight.to(gl.int64), k_weight.to(gl.int64))
        norm = norm.to(words, bitcast=True)
        for chunk in gl.static_range(CHUNKS):
            factors = factors + (gl.load(norm + column + warp * 0 + chunk * 16),)
    slot = gl.load(slots + row).to(gl.int64)
    place = (slot // BLOCK_SIZE) * (KV_BLOCK // 2) + (slot % BLOCK_SIZE) * (KV_TOKEN // 2)
    all_sums = gl.allocate_shared_memory(
        gl.float32, [SIDES * 4, WARPS, 8, 4, 4],
        gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0]),
    )  # fmt: skip
    order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    all_tops = gl.allocate_shared_memory(gl.float32, [1, WARPS, 8, 4, 1], order)
    all_masses = gl.allocate_shared_memory(gl.float32, [1, WARPS, 8, 4, 1], order)
    heads = qkv.to(words, bitcast=True)
    heads += row.to(gl.int64) * ((Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM // 2)
    mine = gl.where(is_query, head * GROUP + line, Q_HEADS + head) * (HEAD_DIM // 2)
    mine = mine + column + warp * 0
    newest = heads + (Q_HEADS + NUM_KV_HEADS + head) * (HEAD_DIM // 2) + dims + pair * 0 + warp * 0
    wait_for_previous()
    let_next_start()
    q = ()
    for chunk in gl.static_range(CHUNKS):
        q = q + (gl.load(heads + mine + chunk * 16),)
    if NORM:
        squares = gl.zeros([WARPS, 8, 4, 4], gl.float32, quads)
        for chunk in gl.static_range(CHUNKS):
            one, other = low_half(q[chunk]), high_half(q[chunk])
            squares += one * one
            squares += other * other
        total = gl.sum(gl.sum(squares, 3), 2)
        inverse = gl.expand_dims(gl.expand_dims(gl.rsqrt(total / HEAD_DIM + eps), 2), 3)
        normed = ()
        for chunk in gl.static_range(CHUNKS):
            scaled = pack(low_half(q[chunk]) * inverse, high_half(q[chunk]) * inverse)
            normed = normed + (times(scaled, factors[chunk]),)
        q = normed
    firsts = ()
    seconds = ()
    for chunk in gl.static_range(CHUNKS // 2):
        first_half, second_half = q[chunk], q[CHUNKS // 2 + chunk]
        cos, sin = cosines[chunk], sines[chunk]
        firsts = firsts + (minus(times(first_half, cos), times(second_half, sin)),)
        seconds = seconds + (plus(times(second_half, cos), times(first_half, sin)),)
    q = firsts + seconds
    # The first warp of the first piece has row GROUP: the newest key and value.
    is_key = (line == GROUP) & (first == 0) & (column >= 0)
    is_value = (pair * 2 + GROUP % 2 == GROUP) & (first == 0) & (dims >= 0)
    joined = ()
    for chunk in gl.static_range(CHUNKS):
        joined = joined + (gl.where(is_key, q[chunk], keys[chunk]),)
    for chunk in gl.static_range(CHUNKS):
        joined = joined + (keys[CHUNKS + chunk],)
    keys = joined
    joined = ()
    for each in gl.static_range(4 * SIDES):
        if each // SIDES == GROUP % 2:
            new = gl.load(newest + each % SIDES * 32, mask=is_value, other=0)
            joined = joined + (new | values[each],)
        else:
            joined = joined + (values[each],)
    values = joined
    if piece == 0:  # noqa: SIM102
        if slot >= 0:
            for chunk in gl.static_range(CHUNKS):
                at_key = k + place + column + warp * 0 + line * 0 + chunk * 16
                gl.store(at_key, q[chunk], mask=is_key)
            for side in gl.static_range(SIDES):
                at_value = v + place + dims + pair * 0 + warp * 0 + side * 32
                gl.store(at_value, values[GROUP % 2 * SIDES + side], mask=is_value)
    none = gl.zeros([WARPS, 8, 4], gl.float32, lanes)
    zero = gl.zeros([WARPS, 8, 4], gl.int32, lanes)
    place_of_key = along(2, 4, lanes, 3) * 2 + along(1, 8, lanes, 3) * 0
    warp_of_key = along(0, WARPS, lanes, 3)
    last = gl.where(older >= GROUP, older, older - 1)  # the last older row
    top = gl.full([WARPS, 8, 4], LOWEST, gl.float32, lanes)
    mass = none
    acc = ()
    for _ in gl.static_range(SIDES * 16):
        acc = acc + (none,)
    for turn in range(size // ROUND):
        low = (none, none, none, none)
        high = (none, none, none, none)
        for chunk in gl.static_range(CHUNKS):
            a = four(q[chunk], lanes)
            b = four(keys[chunk], lanes)
            c = four(keys[CHUNKS + chunk], lanes)
            low = multiply(a[0], zero, a[1], zero, b[0], b[1], low)
            high = multiply(a[0], zero, a[1], zero, c[0], c[1], high)
            low = multiply(a[2], zero, a[3], zero, b[2], b[3], low)
            high = multiply(a[2], zero, a[3], zero, c[2], c[3], high)
        later = first + (turn + 1) * ROUND
        end = gl.minimum(older, start + size - 1)
        keys = _keys(
            k, table, later, end, column, line, GROUP, BLOCK_SIZE, KV_BLOCK, KV_TOKEN, CHUNKS
        )
        key = start + turn * ROUND + warp_of_key * 16 + place_of_key
        s0 = gl.where((key <= last) | (key == GROUP), low[0] * qk_scale, LOWEST)
        s1 = gl.where((key + 1 <= last) | (key + 1 == GROUP), low[1] * qk_scale, LOWEST)
        s2 = gl.where((key + 8 <= last) | (key + 8 == GROUP), high[0] * qk_scale, LOWEST)
        s3 = gl.where((key + 9 <= last) | (key + 9 == GROUP), high[1] * qk_scale, LOWEST)
        best = gl.max(gl.maximum(gl.maximum(s0, s1), gl.maximum(s2, s3)), 2)
        new_top = gl.maximum(top, gl.expand_dims(best, 2))
        fade = gl.exp2(top - new_top)
        top = new_top
        p0 = gl.where(s0 > LOWEST, gl.exp2(s0 - top), 0.0)
        p1 = gl.where(s1 > LOWEST, gl.exp2(s1 - top), 0.0)
        p2 = gl.where(s2 > LOWEST, gl.exp2(s2 - top), 0.0)
        p3 = gl.where(s3 > LOWEST, gl.exp2(s3 - top), 0.0)
        mass = mass * fade + ((p0 + p1) + (p2 + p3))
        early = pack(p0, p1)
        late = pack(p2, p3)
        new_acc = ()
        for side in gl.static_range(SIDES):
            w0 = four(values[side], lanes)
            w1 = four(values[SIDES + side], lanes)
            w2 = four(values[2 * SIDES + side], lanes)
            w3 = four(values[3 * SIDES + side], lanes)
            for each in gl.static_range(8):
                if each % 2 == 0:
                    b0 = low_halves(w0[each // 2], w1[each // 2])
                    b1 = low_halves(w2[each // 2], w3[each // 2])
                else:
                    b0 = high_halves(w0[each // 2], w1[each // 2])
                    b1 = high_halves(w2[each // 2], w3[each // 2])
                even, odd = acc[side * 16 + each * 2], acc[side * 16 + each * 2 + 1]
                c = multiply(early, zero, late, zero, b0, b1, (even * fade, odd * fade, none, none))
                new_acc = new_acc + (c[0], c[1])
        acc = new_acc
        values = _values(
            v, table, later, end, pair, dims, GROUP, BLOCK_SIZE, KV_BLOCK, KV_TOKEN, SIDES
        )
    all_tops.index(0).store(top.reshape([WARPS, 8, 4, 1]))
    mass = gl.expand_dims(gl.sum(mass, 2), 2) + none
    all_masses.index(0).store(mass.reshape([WARPS, 8, 4, 1]))
    stacked = stack(acc, SIDES * 16).reshape([WARPS, 8, 4, SIDES * 4, 4])
    all_sums.store(stacked.permute([3, 0, 1, 2, 4]))
    gl.thread_barrier()
    PART: gl.constexpr = 2 if MEMBERS > 1 else 1
    added: gl.constexpr = gl.BlockedLayout(
        [1, WARPS, 1, 1, 1], [2 // PART, 1, PART, 4, 4], [WARPS, 1, 1, 1, 1], [4, 3, 2, 0, 1]
    )
    flat: gl.constexpr = gl.SliceLayout(1, added)
    whole: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    shape: gl.constexpr = [1, WARPS, 8, 4, 1]
    tops = all_tops._reinterpret(gl.float32, shape, whole).slice(0, MEMBERS, 2).load(added)
    masses = all_masses._reinterpret(gl.float32, shape, whole).slice(0, MEMBERS, 2).load(added)
    best = gl.max(tops, 1)
    weight = gl.exp2(tops - gl.expand_dims(best, 1))
    total = gl.sum(masses * weight, 1)
    result = gl.sum(all_sums.slice(0, MEMBERS, 2).load(added) * weight, 1)
    result = gl.where(length > 0, result / gl.where(total > 0, total, 1.0), 0.0)
    index = along(0, SIDES * 4, flat, 4) * 4 + along(3, 4, flat, 4)
    member = along(1, MEMBERS, flat, 4)
    quarter = along(2, 4, flat, 4)
    spot = _spot(member, index, quarter, HEAD_DIM)
    real = (member < GROUP) & (spot >= 0)
    item = row * NUM_KV_HEADS + head
    if pieces == 1:
        gl.store(out + item * (GROUP * HEAD_DIM) + spot, result.to(out.dtype.element_ty), mask=real)
    else:
        part = item * PIECES + piece
        gl.store(partials + part * (GROUP * HEAD_DIM) + spot, result, mask=real)
        log = best + gl.log2(total) + spot * 0
        once = real & (index == 0) & (quarter == 0)
        gl.store(sums + part * GROUP + member + spot * 0, log, mask=once)
        gl.thread_barrier()  # all warps must have stored before one thread releases
        arrived = gl.atomic_add(counters + item, 1, sem="acq_rel", scope="gpu")
        if arrived == pieces - 1:
            gl.store(counters + item, 0)  # ready for the next layer
            _merge(partials, sums, out, item, pieces, GROUP, MEMBERS, HEAD_DIM, PIECES, WARPS)
