"""Hidden values times the B of each token's adapter, added to the product of the base.

A program handles a tile of one adapter's tokens and some columns of one part.
"""

# mypy: disable-error-code="assignment, unreachable, var-annotated"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv
from nv_kernels.linear.lora.plan import LOW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nv_kernels.linear.lora.plan import LoraPlan

BLOCK_N = 128
MOST_PARTS = 3
MOST_RANK = 64  # of B's columns, per iteration

gdc_launch = tl.extra.cuda.gdc_launch_dependents
gdc_wait = tl.extra.cuda.gdc_wait


@triton.jit
def _delta(
    hidden, b, adapter, sources, is_real, columns, last, part, num_tokens, b_stride,
    R: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The adapter's product [BLOCK_M, BLOCK_N] of some columns of a part."""
    ranks = tl.arange(0, BLOCK_R)
    b_at = b + adapter * b_stride + columns[:, None].to(tl.int64) * R + ranks[None, :]
    h_at = hidden + sources[:, None] * ROWS + part * R + ranks[None, :]
    sums = tl.zeros([sources.shape[0], columns.shape[0]], tl.float32)
    for r in tl.static_range(0, R, BLOCK_R):
        factors = tl.load(b_at + r, mask=(columns < last)[:, None], other=0.0)
        values = tl.load(h_at + r, mask=is_real[:, None], other=0.0)
        for split in tl.static_range(1, SPLITS):
            more = h_at + split * num_tokens.to(tl.int64) * ROWS + r
            values += tl.load(more, mask=is_real[:, None], other=0.0)
        sums = tl.dot(values.to(factors.dtype), factors.T, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    product, hidden, b, places, tile_adapters, num_tokens, b_stride,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add BLOCK_N columns of a tile's delta to a product [T, N0 + N1 + N2]."""
    if PDL:
        gdc_launch()
    N: tl.constexpr = N0 + N1 + N2
    B0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    B1: tl.constexpr = B0 + (N1 + BLOCK_N - 1) // BLOCK_N
    tile, block = tl.program_id(1), tl.program_id(0)
    adapter = tl.load(tile_adapters + tile).to(tl.int64)
    tokens = tl.load(places + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    if PDL:
        gdc_wait()
    if adapter < 0:
        return
    part = (block >= B0).to(tl.int32) + (block >= B1).to(tl.int32)
    first = tl.where(part == 0, 0, tl.where(part == 1, N0, N0 + N1))
    last = tl.where(part == 0, N0, tl.where(part == 1, N0 + N1, N))
    block -= tl.where(part == 0, 0, tl.where(part == 1, B0, B1))
    columns = first + block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_real = tokens >= 0
    sources = tl.where(is_real, tokens, 0).to(tl.int64)
    place = product + sources[:, None] * N + columns[None, :]
    mask = is_real[:, None] & (columns < last)[None, :]
    total = tl.load(place, mask=mask, other=0.0).to(tl.float32)  # the longest way, so first
    delta = _delta(
        hidden, b, adapter, sources, is_real, columns, last, part, num_tokens, b_stride,
        R, ROWS, SPLITS, BLOCK_R,
    )  # fmt: skip
    tl.store(place, (total + delta).to(product.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def expand_gated_kernel(
    product, hidden, b, places, tile_adapters, out, num_tokens, b_stride,
    F: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gate BLOCK_N columns of a tile, its delta added; tiles without an adapter have none."""
    if PDL:
        gdc_launch()
    tile, block = tl.program_id(1), tl.program_id(0)
    adapter = tl.load(tile_adapters + tile).to(tl.int64)
    tokens = tl.load(places + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    is_real = tokens >= 0
    sources = tl.where(is_real, tokens, 0).to(tl.int64)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = is_real[:, None] & (columns < F)[None, :]
    place = product + sources[:, None] * (2 * F) + columns[None, :]
    if PDL:
        gdc_wait()
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + F, mask=mask, other=0.0).to(tl.float32)
    if adapter >= 0:
        gate += _delta(
            hidden, b, adapter, sources, is_real, columns, F, 0, num_tokens, b_stride,
            R, 2 * R, SPLITS, BLOCK_R,
        )  # fmt: skip
        up += _delta(
            hidden, b, adapter, sources, is_real, columns + F, 2 * F, 1, num_tokens, b_stride,
            R, 2 * R, SPLITS, BLOCK_R,
        )  # fmt: skip
    dtype = out.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    gate = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    tl.store(out + sources[:, None] * F + columns[None, :], (gate * up).to(dtype), mask=mask)


def lora_expand(
    product: torch.Tensor,
    hidden: torch.Tensor,
    b: torch.Tensor,
    part_rows: Sequence[int],
    plan: LoraPlan,
) -> torch.Tensor:
    """Multiply by B and add; see `nv_kernels.reference.lora_expand`.

    Args:
        product: [T, N] or [P, T, N], contiguous.
        hidden: [Z, T, parts * R], R a power of two from 16 on.
        b: [S, N, R].
        part_rows: of at most MOST_PARTS parts.
        plan: the tokens by adapter.
    """
    assert product.is_contiguous(), "it is changed in place"
    splits, tokens, rows = hidden.shape
    n0, n1, n2 = (*part_rows, 0, 0)[:MOST_PARTS]
    rank = b.shape[2]
    blocks = sum(cdiv(each, BLOCK_N) for each in part_rows)
    expand_kernel[(blocks, len(plan.tile_adapters))](
        product, hidden, b, plan.places, plan.tile_adapters, tokens, b.stride(0),
        n0, n1, n2, rank, rows, splits, plan.tile, BLOCK_N, min(rank, MOST_RANK),
        num_warps=8 if plan.tile > LOW else 4, **dependent_launch(product),
    )  # fmt: skip
    return product


def lora_expand_gated(
    product: torch.Tensor,
    hidden: torch.Tensor,
    b: torch.Tensor,
    part_rows: Sequence[int],
    plan: LoraPlan,
) -> torch.Tensor:
    """Multiply by B, add and gate; see `nv_kernels.reference.lora_expand_gated`."""
    splits, tokens, _ = hidden.shape
    width, rank = part_rows[0], b.shape[2]
    product = product.contiguous()
    out = torch.empty(tokens, width, dtype=product.dtype, device=product.device)
    expand_gated_kernel[(cdiv(width, BLOCK_N), len(plan.tile_adapters))](
        product, hidden, b, plan.places, plan.tile_adapters, out, tokens, b.stride(0),
        width, rank, splits, plan.tile, BLOCK_N, min(rank, MOST_RANK),
        num_warps=8 if plan.tile > LOW else 4, **dependent_launch(product),
    )  # fmt: skip
    return out
