"""What the decode kernel does before its loop: fetch ahead, and make the step's own token.

Owns device functions alone: the prefetch into L2, and the fused prologue, which turns a row of
the projection into a kv head's rotated queries and the new token's key and value. Rounding points
are `rope_store`'s. Never waits for the kernel ahead, never attends.
"""

# A kernel is written in Triton's own dialect, which neither tool reads.
# ruff: noqa: ANN001, ANN201, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from nv_kernels.triton.previous import prefetch_l2
from nv_kernels.triton.rope_store import load_half
from nv_kernels.triton.store_kv import encode_fp8, store_half


@triton.jit
def load_angles(
    cos_sin_ptr, position, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, dtype: tl.constexpr
):
    """Give a position's cosines and signed sines [DIM] in fp32, rounded to dtype first.

    A column turns as x * cos + partner * sin, its partner being half a head away: the first
    half's sines are negative.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, DIM)
    angles = cos_sin_ptr + position.to(tl.int64) * HEAD_DIM + column % HALF
    inside = column < HEAD_DIM
    cos = tl.load(angles, mask=inside, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(angles + HALF, mask=inside, other=0.0).to(dtype).to(tl.float32)
    return cos, tl.where(column < HALF, -sin, sin)


@triton.jit
def load_weights(weight_ptr, NORM: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Give a norm's weights of each column and of its partner, [DIM] fp32; zeros without a norm."""
    column = tl.arange(0, DIM)
    own = tl.zeros([DIM], tl.float32)
    partner = own
    if NORM:
        inside = column < HEAD_DIM
        away = (column + HEAD_DIM // 2) % HEAD_DIM
        own = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        partner = tl.load(weight_ptr + away, mask=inside, other=0.0).to(tl.float32)
    return own, partner


@triton.jit
def turned_heads(
    x_ptr,
    start,
    there,
    plane,
    own_weight,
    partner_weight,
    cos,
    sin,
    eps,
    NUM_PARTIALS: tl.constexpr,
    NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    dtype: tl.constexpr,
):
    """Norm and rotate the heads that begin at start [M], where there [M]: [M, DIM] in dtype."""
    column = tl.arange(0, DIM)
    away = (column + HEAD_DIM // 2) % HEAD_DIM
    mask = there[:, None] & (column < HEAD_DIM)[None, :]
    x = load_half(x_ptr, start[:, None] + column[None, :], mask, plane, NUM_PARTIALS, dtype)
    y = load_half(x_ptr, start[:, None] + away[None, :], mask, plane, NUM_PARTIALS, dtype)
    if NORM:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = (x * inverse).to(dtype).to(tl.float32) * own_weight[None, :]
        y = (y * inverse).to(dtype).to(tl.float32) * partner_weight[None, :]
        x = x.to(dtype).to(tl.float32)
        y = y.to(dtype).to(tl.float32)
    kept = (x * cos[None, :]).to(dtype).to(tl.float32)
    return (kept + (y * sin[None, :]).to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def as_read(x, inverse_scale, FP8: tl.constexpr):
    """Give in fp32 what the loop would read of a stored x: of e4m3 its value times 2**-8."""
    if FP8:
        byte = encode_fp8(x.to(tl.float32) * inverse_scale).to(tl.uint16)
        bits = ((byte & 0x7F) << 7) | ((byte & 0x80) << 8)  # as fp8_pairs
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:  # noqa: RET505  one return a branch: only the taken one is compiled
        return x.to(tl.float32)


@triton.jit
def store_new(ptr, place, x, inverse_scale, mask, FP8: tl.constexpr):
    """Store a new key or value [1, DIM]; ptr and place count loaded elements: pairs of e4m3."""
    column = tl.arange(0, x.shape[1])[None, :]
    if FP8:
        ptr = ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        place = place * 2
    store_half(ptr, place + column, x, inverse_scale, mask, FP8)


@triton.jit
def repeat_rows(x, M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr):
    """Repeat [M, N] to [ROWS, N]: the rows of a dot that are nobody's are copies."""
    return tl.broadcast_to(x[None, :, :], [ROWS // M, M, N]).reshape([ROWS, N])


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
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    KV_TOKEN: tl.constexpr,
):
    """Fetch a piece's first PREFETCH tiles into L2, which another kernel's writes cannot stale."""
    LINES: tl.constexpr = triton.next_power_of_2((WIDTH + 63) // 64)  # 128 bytes, 64 elements each
    line = tl.arange(0, TILE * LINES)
    token = line // LINES
    for ahead in tl.static_range(PREFETCH):
        tile = first_tile + ahead
        there = ahead < num_tiles
        wanted = there & (token < length - tile * TILE) & ((line % LINES) * 64 < WIDTH)
        if PAGE >= TILE:
            tile_block = block
            if ahead == 1:
                tile_block = next_block
            if ahead > 1:
                last = tl.maximum(tl.minimum(tile, first_tile + num_tiles - 1), 0)
                tile_block = tl.load(table + (last * TILE) // PAGE)
            start = tl.where(there, tile_block, 0).to(tl.int64) * KV_BLOCK
            start += tl.where(there, (tile * TILE) % PAGE, 0) * KV_TOKEN
            spot = start + tl.where(wanted, token * KV_TOKEN + (line % LINES) * 64, 0)
        else:
            blocks = tl.load(table + (tile * TILE + token) // PAGE, mask=wanted, other=0)
            inner = tl.where(wanted, (token % PAGE) * KV_TOKEN + (line % LINES) * 64, 0)
            spot = blocks.to(tl.int64) * KV_BLOCK + inner
        prefetch_l2(k_ptr + spot)
        prefetch_l2(v_ptr + spot)
