"""Many tokens times their experts' weights, on the tensor cores, in tiles of one expert's entries.

Owns the settings of each height of tile. They follow those of `linear.tuned` for the same number of
tokens and were not measured.
"""

# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv
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
    16: TileShape(64, 128, 4, 4),
    32: TileShape(64, 128, 3, 4),
    64: TileShape(64, 64, 4, 4),
    128: TileShape(128, 64, 3, 8),
}
"""By height, of gate and up; each output reads two rows of the weight."""
DOWN = {
    16: TileShape(128, 128, 4, 4),
    32: TileShape(128, 128, 3, 4),
    64: TileShape(128, 64, 4, 4),
    128: TileShape(128, 64, 4, 8),
}
"""By height, of the last product."""
SINGLE = TileShape(32, 32, 2, 4)
"""Of fp32, whose dots run on the CUDA cores."""


@triton.jit
def _dot(tile, rows, sums, SWAP: tl.constexpr):
    """Add tile [M, K] by rows [N, K] to [M, N], or to [N, M] if SWAP."""
    if SWAP:
        return tl.dot(rows, tile.T, sums, input_precision="ieee")
    else:
        return tl.dot(tile, rows.T, sums, input_precision="ieee")


@triton.jit
def _along(values, SWAP: tl.constexpr):
    """Lay values [N] along sums [M, N], or along [N, M] if SWAP."""
    if SWAP:
        return values[:, None]
    else:
        return values[None, :]


@triton.jit(do_not_specialize=["num_tokens"])
def tiles_kernel(
    x, weight, bias, places, tile_experts, scales, out, num_tokens,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N of the N outputs of a tile of BLOCK_M entries.

    GATED: x [T, K], weight [E, 2N, K], bias [E, 2N] -> gated [T, k, N]. Else: x [T, k, K], weight
    [E, N, K], bias [E, N] -> partials [k, T, N], multiplied by the routing's weights.
    """
    wait_for_previous(PDL)
    SWAP: tl.constexpr = BLOCK_M < 64  # the weight's rows lie along the dot's long side
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // tiles_n
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    entries = tl.load(places + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    is_real = entries >= 0
    outputs = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    sources = entries // TOP_K if GATED else entries
    sources = tl.where(is_real, sources, 0).to(tl.int64)
    x_at = x + sources[:, None] * K + columns[None, :]
    # Rows past the last read real rows and are not stored.
    rows = weight + (expert * (2 if GATED else 1) * N + outputs % N)[:, None] * K + columns[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    ups = sums
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = (k + columns < K)[None, :]
        if K % BLOCK_K == 0:
            values = tl.load(x_at + k, mask=is_real[:, None], other=0.0)
            sums = _dot(values, tl.load(rows + k), sums, SWAP)
            if GATED:
                ups = _dot(values, tl.load(rows + N * K + k), ups, SWAP)
        else:
            values = tl.load(x_at + k, mask=is_real[:, None] & inside, other=0.0)
            sums = _dot(values, tl.load(rows + k, mask=inside, other=0.0), sums, SWAP)
            if GATED:
                ups = _dot(values, tl.load(rows + N * K + k, mask=inside, other=0.0), ups, SWAP)
    if bias is not None:
        added = bias + expert * (2 * N if GATED else N) + outputs % N
        sums += _along(tl.load(added).to(tl.float32), SWAP)
        if GATED:
            ups += _along(tl.load(added + N).to(tl.float32), SWAP)
    if GATED:
        sums = gated(sums, ups, ALPHA, LIMIT, SHIFT)
    if SWAP:
        sums = sums.T
    if GATED:
        places_out = entries
    else:
        scale = tl.load(scales + entries, mask=is_real, other=0.0).to(tl.float32)
        sums = sums * scale[:, None]
        places_out = (entries % TOP_K) * num_tokens + entries // TOP_K
    at = places_out[:, None].to(tl.int64) * N + outputs[None, :]
    mask = is_real[:, None] & (outputs < N)[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=mask)


def tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    out: torch.Tensor,
    *,
    gate: Gate | None,
) -> None:
    """Multiply each tile of entries by its expert's matrix.

    Args:
        x: [T, K] if gated, else [T, k, K].
        weight: [E, 2N, K] if gated, else [E, N, K].
        bias: [E, 2N] or [E, N], or None.
        routing: of the tokens, with tiles.
        out: [T, k, N] if gated, else [k, T, N].
        gate: of the products; None: multiply by the routing's weights.
    """
    by_height = DOWN if gate is None else GATED
    shape = SINGLE if x.dtype == torch.float32 else by_height[routing.tile]
    assert routing.tile_experts is not None
    num_tokens, top_k = routing.experts.shape
    outputs, columns = out.shape[2], x.shape[-1]
    programs = routing.tile_experts.shape[0] * cdiv(outputs, shape.block_n)
    tiles_kernel[(programs,)](
        x, weight, bias, routing.places, routing.tile_experts, routing.weights, out, num_tokens,
        outputs, columns, top_k, *constants(gate), routing.tile, shape.block_n, shape.block_k,
        shape.stages, num_warps=shape.warps, **dependent_launch(x),
    )  # fmt: skip
