"""Several tokens times their experts' weights, on the tensor cores, in tiles of one expert each.

Owns both ways by which a program finds its entries: sorted into tiles, or, with so few tokens that
a program can look at all of them, from the slots of its expert. Owns the settings of each height of
tile: those of 16 and 128 were measured on an H200, the others follow `linear.tuned` for the same
number of tokens. On cards that have it, the weights' rows are read by bulk copy (TMA).
"""

# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.launch.triton_previous import wait_for_previous
from nv_kernels.linear.experts.triton_gate import constants, gated

if TYPE_CHECKING:
    from nv_kernels.linear.experts.gate import Gate
    from nv_kernels.linear.experts.routing import Routing


@dataclass(frozen=True)
class TileShape:
    """The settings of a product.

    Attributes:
        block_n: outputs per program.
        block_k: columns per iteration of the loop.
        stages: stages of the software pipeline.
        warps: warps per program.
    """

    block_n: int
    block_k: int
    stages: int
    warps: int


GATED = {
    16: TileShape(64, 128, 2, 4),
    32: TileShape(64, 128, 3, 4),
    64: TileShape(64, 64, 4, 4),
    128: TileShape(128, 64, 3, 8),
}
"""By height, of gate and up; each output reads two rows of the weight."""
DOWN = {
    16: TileShape(128, 128, 3, 4),
    32: TileShape(128, 128, 3, 4),
    64: TileShape(128, 64, 4, 4),
    128: TileShape(256, 64, 3, 8),
}
"""By height, of the last product."""
JOINED_FROM = tl.constexpr(64)
"""The least height at which one dot has the rows of gate and of up."""
SINGLE = TileShape(32, 16, 2, 8)
"""Of fp32, whose dots run on the CUDA cores."""


@triton.jit
def _rows_at(
    weight, matrix, first, N: tl.constexpr, K: tl.constexpr, SIDES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Return pointers to the first columns of rows of SIDES matrices, if they are used."""
    if BULK:
        return 0
    else:
        row = tl.arange(0, SIDES * BLOCK_N)
        row = (matrix + row // BLOCK_N).to(tl.int64) * N + (first + row % BLOCK_N) % N
        return weight + row[:, None] * K + tl.arange(0, BLOCK_K)[None, :]


@triton.jit
def _rows(
    weight, at, matrix, first, k, K: tl.constexpr, SIDES: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Load [SIDES * BLOCK_N, BLOCK_K], the rows from `first` on of SIDES matrices."""
    if BULK:
        return weight.load([matrix, first, k]).reshape(SIDES * BLOCK_N, BLOCK_K)
    elif K % BLOCK_K == 0:
        return tl.load(at + k)
    else:
        return tl.load(at + k, mask=(k + tl.arange(0, BLOCK_K) < K)[None, :], other=0.0)


@triton.jit
def _sums(
    x_at, weight, matrix, first, is_real,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Multiply rows of x by rows of a matrix, and of the next one if GATED: two [BLOCK_M, BLOCK_N].

    A low tile has the weight's rows along the dot's long side. A high one has the rows of both
    matrices in one dot.
    """
    columns = tl.arange(0, BLOCK_K)
    if BLOCK_M < JOINED_FROM:
        at = _rows_at(weight, matrix, first, N, K, 1, BLOCK_N, BLOCK_K, BULK)
        gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            mask = is_real if K % BLOCK_K == 0 else is_real & (k + columns < K)[None, :]
            values = tl.load(x_at + k, mask=mask, other=0.0)
            rows = _rows(weight, at, matrix, first, k, K, 1, BLOCK_N, BLOCK_K, BULK)
            gate = tl.dot(rows, values.T, gate, input_precision="ieee")
            if GATED:
                side = at if BULK else at + N * K
                rows = _rows(weight, side, matrix + 1, first, k, K, 1, BLOCK_N, BLOCK_K, BULK)
                up = tl.dot(rows, values.T, up, input_precision="ieee")
        return gate.T, up.T
    else:
        SIDES: tl.constexpr = 2 if GATED else 1
        at = _rows_at(weight, matrix, first, N, K, SIDES, BLOCK_N, BLOCK_K, BULK)
        sums = tl.zeros([BLOCK_M, SIDES * BLOCK_N], tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            mask = is_real if K % BLOCK_K == 0 else is_real & (k + columns < K)[None, :]
            values = tl.load(x_at + k, mask=mask, other=0.0)
            rows = _rows(weight, at, matrix, first, k, K, SIDES, BLOCK_N, BLOCK_K, BULK)
            sums = tl.dot(values, rows.T, sums, input_precision="ieee")
        if GATED:
            return tl.split(tl.permute(tl.reshape(sums, [BLOCK_M, 2, BLOCK_N]), (0, 2, 1)))
        else:
            return sums, sums


@triton.jit
def _multiply(
    x, weight, bias, scales, out, expert, first, entries, is_real, num_tokens,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Compute outputs [first, first + BLOCK_N) of entries [BLOCK_M] of one expert, and store them.

    GATED: x [T, K], weight [E, 2N, K], bias [E, 2N] -> gated [T, k, N]. Else: x [T, k, K], weight
    [E, N, K], bias [E, N] -> partials [k, T, N], multiplied by the routing's weights. BULK: weight
    is a descriptor of matrices [N, K]. Rows past the last are not stored.
    """
    sources = entries // TOP_K if GATED else entries
    sources = tl.where(is_real, sources, 0).to(tl.int64)
    x_at = x + sources[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    matrix = expert * 2 if GATED else expert
    gate, up = _sums(
        x_at, weight, matrix, first, is_real[:, None], N, K, GATED, BLOCK_M, BLOCK_N, BLOCK_K,
        STAGES, BULK,
    )  # fmt: skip
    finish_entries(
        gate, up, bias, scales, out, expert, first, entries, is_real, num_tokens, N, TOP_K, GATED,
        ALPHA, LIMIT, SHIFT, BLOCK_N,
    )  # fmt: skip


@triton.jit
def finish_entries(
    gate, up, bias, scales, out, expert, first, entries, is_real, num_tokens,
    N: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, SHIFT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add biases to sums [BLOCK_M, BLOCK_N] of entries, gate or weight them, and store them.

    A program that multiplies without a gate has its sums in `gate`.
    """
    outputs = first + tl.arange(0, BLOCK_N)
    inside = outputs < N
    if GATED:
        if bias is not None:
            added = bias + expert.to(tl.int64) * (2 * N) + outputs
            gate += tl.load(added, mask=inside, other=0.0).to(tl.float32)[None, :]
            up += tl.load(added + N, mask=inside, other=0.0).to(tl.float32)[None, :]
        y = gated(gate, up, ALPHA, LIMIT, SHIFT)
        places = entries
    else:
        y = gate
        if bias is not None:
            added = bias + expert.to(tl.int64) * N + outputs
            y += tl.load(added, mask=inside, other=0.0).to(tl.float32)[None, :]
        y *= tl.load(scales + entries, mask=is_real, other=0.0).to(tl.float32)[:, None]
        places = (entries % TOP_K) * num_tokens + entries // TOP_K
    at = places[:, None].to(tl.int64) * N + outputs[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=is_real[:, None] & inside[None, :])


@triton.jit
def find_slots(
    slots, num_tokens,
    N: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Load the slots of this program's expert, and wait for the previous kernel.

    Returns the expert, the first of the program's outputs, the slots [TOKENS], the number of each
    entry from 1 on (0: the token has none here), and how many entries there are.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    expert = tl.program_id(0) // tiles_n
    first = (tl.program_id(0) % tiles_n) * BLOCK_N
    if not EARLY:
        wait_for_previous(PDL)
    tokens = tl.arange(0, TOKENS)
    at = slots + expert * num_tokens + tokens
    slot = tl.load(at, mask=tokens < num_tokens, other=-1).to(tl.int32)
    chosen = (slot >= 0).to(tl.int32)
    order = tl.cumsum(chosen, 0) * chosen
    count = tl.max(order, 0)
    if EARLY:
        wait_for_previous(PDL)
    return expert, first, slot, order, count


@triton.jit
def chosen_entries(
    slot, order, start, count, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, TOKENS: tl.constexpr
):
    """Return an expert's BLOCK_M entries after the first `start` of `count`, and which are real."""
    wanted = start + 1 + tl.arange(0, BLOCK_M)
    hit = order[None, :] == wanted[:, None]
    every = (tl.arange(0, TOKENS) * TOP_K + slot)[None, :]
    return tl.sum(tl.where(hit, every, 0), 1), wanted <= count


@triton.jit(do_not_specialize=["num_tokens"])
def sorted_kernel(
    x, weight, bias, scales, out, places, tile_experts, num_tokens,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, BULK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N of the N outputs of a tile of BLOCK_M entries."""
    wait_for_previous(PDL)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // tiles_n
    expert = tl.load(tile_experts + tile)
    if expert < 0:
        return
    entries = tl.load(places + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    _multiply(
        x, weight, bias, scales, out, expert, (tl.program_id(0) % tiles_n) * BLOCK_N, entries,
        entries >= 0, num_tokens, N, K, TOP_K, GATED, ALPHA, LIMIT, SHIFT, BLOCK_M, BLOCK_N,
        BLOCK_K, STAGES, BULK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def slots_kernel(
    x, weight, bias, scales, out, slots, num_tokens,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, BULK: tl.constexpr,
    TOKENS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N of the N outputs of all entries of an expert, BLOCK_M at a time.

    TOKENS is at least num_tokens. EARLY: the slots are older than the previous kernel.
    """
    expert, first, slot, order, count = find_slots(
        slots, num_tokens, N, BLOCK_N, TOKENS, EARLY, PDL
    )
    for start in range(0, count, BLOCK_M):
        entries, is_real = chosen_entries(slot, order, start, count, TOP_K, BLOCK_M, TOKENS)
        _multiply(
            x, weight, bias, scales, out, expert, first, entries, is_real, num_tokens, N, K, TOP_K,
            GATED, ALPHA, LIMIT, SHIFT, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, BULK,
        )  # fmt: skip


def tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    gate: Gate | None,
    *,
    is_after_gated: bool = False,
) -> torch.Tensor:
    """Multiply the entries of each expert by its matrix.

    Args:
        x: [T, K] with a gate, else [T, k, K].
        weight: [E, 2N, K] with a gate, else [E, N, K].
        bias: [E, 2N] or [E, N], or None.
        routing: of the tokens, with tiles.
        gate: of the products; None: multiply by the routing's weights.
        is_after_gated: the previous kernel made x, and the routing is older.

    Returns:
        [T, k, N] with a gate, else [k, T, N].
    """
    num_tokens, top_k = routing.experts.shape
    sides = 1 if gate is None else 2
    outputs, columns = weight.shape[1] // sides, weight.shape[2]
    pair = (top_k, num_tokens) if gate is None else (num_tokens, top_k)
    out = torch.empty(*pair, outputs, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    by_height = DOWN if gate is None else GATED
    shape = SINGLE if x.dtype == torch.float32 else by_height[routing.tile]
    options = dependent_launch(x)
    is_bulk = has_bulk_copies(weight)
    rows = weight
    if is_bulk:
        stack = weight.view(-1, outputs, columns)
        box = [sides if routing.tile >= JOINED_FROM.value else 1, shape.block_n, shape.block_k]
        rows = TensorDescriptor.from_tensor(stack, box)
    common = (x, rows, bias, routing.weights, out)
    sizes = (
        outputs, columns, top_k, *constants(gate), routing.tile, shape.block_n, shape.block_k,
        shape.stages, is_bulk,
    )  # fmt: skip
    tiles_n = cdiv(outputs, shape.block_n)
    if routing.slots is not None:
        slots_kernel[(weight.shape[0] * tiles_n,)](
            *common, routing.slots, num_tokens, *sizes, next_power_of_2(num_tokens),
            is_after_gated, num_warps=shape.warps, **options,
        )  # fmt: skip
        return out
    assert routing.tile_experts is not None
    sorted_kernel[(routing.tile_experts.shape[0] * tiles_n,)](
        *common, routing.places, routing.tile_experts, num_tokens, *sizes, num_warps=shape.warps,
        **options,
    )  # fmt: skip
    return out


def has_bulk_copies(weight: torch.Tensor) -> bool:
    """Return whether the card can copy boxes of this matrix: from capability 9.0, if aligned."""
    is_aligned = weight.data_ptr() % 16 == 0 and weight.shape[-1] * weight.element_size() % 16 == 0
    return bool(dependent_launch(weight)["PDL"]) and is_aligned
