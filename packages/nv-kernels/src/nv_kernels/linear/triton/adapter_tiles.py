"""Adapters in the kernel of a base's product: A is more rows of the weight, B is more columns.

The A of all adapters in the step lie one below the other. The kernel's first programs multiply the
tokens by them, and need none of the other programs. These multiply by the weight meanwhile. Then
they wait until the hidden values are there, and go on with the B of all adapters, side by side: a
token's values are zeros outside those of its own adapter. Thus one launch does all, and the product
of the base and that of the adapter are added in fp32 and rounded together.
"""

# mypy: disable-error-code="assignment, unreachable, var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from nv_kernels.launch.triton_previous import prefetch_l2

SECTOR = tl.constexpr(16)  # values that a fetch brings at least; it divides a rank


@triton.jit
def rows_of_a(present, tile, BLOCK: tl.constexpr, HEIGHT: tl.constexpr):
    """The adapter of each of BLOCK rows (-2 past the last), and which of its HEIGHT rows it is."""
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    is_real = rows < tl.load(present) * HEIGHT
    adapter = tl.load(present + 1 + rows // HEIGHT, mask=is_real, other=-2).to(tl.int64)
    return adapter, rows % HEIGHT


@triton.jit
def store_hidden(
    sums, hidden, adapters, ready, tokens, adapter, row, num_tokens, split,
    HEIGHT: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Store the hidden values of tokens whose adapter it is, and count this program as ready.

    The sums are [tokens, rows of A], or the other way round if SWAP.
    """
    own = tl.load(adapters + tokens, mask=tokens < num_tokens, other=-1)
    place = (split * num_tokens + tokens)[:, None] * HEIGHT + row[None, :]
    is_own = own[:, None] == adapter[None, :]
    if SWAP:
        tl.store(hidden + place, tl.trans(sums), mask=is_own)
    else:
        tl.store(hidden + place, sums, mask=is_own)
    tl.debug_barrier()  # all threads have stored
    tl.atomic_add(ready, 1, sem="release")


@triton.jit
def fetch_b(
    b, present, rows, split, b_stride,
    RANK: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Start to read into L2 what `add_adapters` will read."""
    count = tl.load(present)
    for first in range(split * BLOCK_S, count, SPLIT_K * BLOCK_S):
        at = first + tl.arange(0, BLOCK_S)
        adapter = tl.load(present + 1 + at, mask=at < count, other=-1).to(tl.int64)
        lines = b + adapter[None, :] * b_stride + rows[:, None].to(tl.int64) * RANK
        for rank in tl.static_range(0, RANK, SECTOR):
            prefetch_l2(lines + rank, (adapter >= 0)[None, :] & (rows >= 0)[:, None])


@triton.jit
def add_adapters(
    sums, hidden, b, adapters, present, ready, tokens, rows, sides, part, split, num_tokens,
    num_a, num_programs, b_stride,
    RANK: tl.constexpr, SIDES: tl.constexpr, HEIGHT: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Add the adapters' products to the sums of a tile, [tokens, rows], or [rows, tokens] if SWAP.

    hidden is [SPLIT_K, num_tokens, HEIGHT], made by num_a programs. `rows` of the weight belong to
    SIDES parts, of which `part` is the first: row i to part + sides[i]. This is program `split` of
    SPLIT_K that share the columns. num_programs wait for the hidden values; the last one resets
    `ready`. An iteration takes BLOCK_W columns of BLOCK_S adapters.
    """
    BLOCK_M: tl.constexpr = tokens.shape[0]
    BLOCK_N: tl.constexpr = rows.shape[0]
    count = tl.load(present)
    own = tl.load(adapters + tokens, mask=tokens < num_tokens, other=-1)
    has_own = (own >= 0)[:, None]
    h_at = hidden + tokens[:, None] * HEIGHT + part * RANK
    b_at = b + rows[:, None].to(tl.int64) * RANK
    while tl.atomic_add(ready, 0, sem="acquire") < num_a:
        pass
    for start in tl.static_range(0, SIDES * RANK, BLOCK_W):
        place = start + tl.arange(0, BLOCK_W)
        values = tl.load(h_at + place[None, :], mask=has_own, other=0.0)
        for more in tl.static_range(1, SPLIT_K):
            further = more * HEIGHT * num_tokens + place
            values += tl.load(h_at + further[None, :], mask=has_own, other=0.0)
        values = values.to(b.dtype.element_ty)
        is_side = sides[:, None] == (place // RANK)[None, :]
        columns_at = b_at + (place % RANK)[None, :]
        for first in tl.range(split * BLOCK_S, count, SPLIT_K * BLOCK_S, num_stages=1):
            at = first + tl.arange(0, BLOCK_S)
            adapter = tl.load(present + 1 + at, mask=at < count, other=-2).to(tl.int64)
            offset = tl.maximum(adapter, 0) * b_stride
            wanted = is_side[:, None, :] & (adapter >= 0)[None, :, None]
            factors = tl.load(
                columns_at[:, None, :] + offset[None, :, None], mask=wanted, other=0.0
            )
            is_own = own[:, None, None] == adapter[None, :, None]
            spread = tl.where(is_own, values[:, None, :], 0.0).to(values.dtype)
            columns = tl.reshape(factors, [BLOCK_N, BLOCK_S * BLOCK_W])
            inner = tl.reshape(spread, [BLOCK_M, BLOCK_S * BLOCK_W])
            if SWAP:
                sums = tl.dot(columns, tl.trans(inner), sums)
            else:
                sums = tl.dot(inner, tl.trans(columns), sums)
    if tl.atomic_add(ready + 1, 1, sem="acq_rel") == num_programs - 1:
        tl.store(ready, 0)
        tl.store(ready + 1, 0)
    return sums
