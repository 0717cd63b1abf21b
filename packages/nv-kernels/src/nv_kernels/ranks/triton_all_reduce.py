"""The sum over ranks, the residual addition and the norm in one launch, over peer memory.

Owns the kernel: one program per row, which sends its part, waits for the other ranks' parts and
normalises. It waits for one transfer over NVLink. Never uses multicast. `nv_kernels.ranks.peers`
has the rules of the buffers, which need no flags: like the low-latency sums of TensorRT-LLM, the
kernel waits until each word differs from the value that the reader left there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nv_kernels.elementwise.norm import sum_dtype
from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import next_power_of_2
from nv_kernels.ranks import peers as records

if TYPE_CHECKING:
    from nv_kernels.ranks.peers import PeerBuffers

gdc_launch = tl.extra.cuda.gdc_launch_dependents
gdc_wait = tl.extra.cuda.gdc_wait
EMPTY = tl.constexpr(records.EMPTY)
WRITTEN_NAN = tl.constexpr(records.WRITTEN_NAN)
MAX_REGISTERS = 128
"""Registers per thread, of at most 512 threads; without it ptxas spills to fit four blocks."""


@triton.jit
def _bits(x):
    """16-bit floats to the low half of int32."""
    return x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _floats(words, DTYPE: tl.constexpr):
    """The low half of int32 to fp32, through a 16-bit float."""
    return (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _buffer(addresses, rank):
    """Where a rank's buffer begins."""
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _half(x, num_rows, at, mask, E: tl.constexpr, PARTIALS: tl.constexpr, DTYPE: tl.constexpr):
    """This rank's part of half a row: partials summed in order, rounded to DTYPE."""
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTIALS):
        start = tl.cast(num_rows, tl.int64) * (part * E)
        values += tl.load(x + start + at, mask=mask, other=0.0).to(tl.float32)
    return values.to(DTYPE)


@triton.jit
def _arrived(place, mask):
    """Wait for the words at `place`, read them, and write EMPTY there."""
    words = tl.load(place, mask=mask, other=0, volatile=True)
    while tl.max((words == EMPTY).to(tl.int32), 0) > 0:
        words = tl.load(place, mask=mask, other=0, volatile=True)
    tl.store(place, tl.full(words.shape, EMPTY, tl.int32), mask=mask)
    return words


@triton.jit(do_not_specialize=["num_rows", "first_row"])
def all_reduce_add_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    addresses,
    counts,
    num_rows,
    first_row,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum one row over the ranks in their order, add the residual, store the total, normalise it.

    Program i has row first_row + i of the tensors and row i of the buffers.
    BLOCK is a power of two of at least E / 2: a program holds the row as two halves.
    """
    if PDL:
        gdc_launch()
    dtype: tl.constexpr = out.dtype.element_ty
    half: tl.constexpr = E // 2
    place_row = tl.program_id(0)
    row = first_row + place_row
    cols = tl.arange(0, BLOCK)
    mask = cols < half
    low_scale = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    high_scale = tl.load(weight + half + cols, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    count = tl.load(counts + place_row)
    low_at = row.to(tl.int64) * E + cols
    high_at = low_at + half
    own_low = _half(x, num_rows, low_at, mask, E, PARTIALS, dtype)
    own_high = _half(x, num_rows, high_at, mask, E, PARTIALS, dtype)
    own = _bits(own_low) | (_bits(own_high) << 16)
    own = tl.where(own == EMPTY, WRITTEN_NAN, own)
    slot = (count & 1) * (SIZE * MAX_ROWS * half) + place_row * half + cols
    for other in tl.static_range(SIZE):
        if other != RANK:
            place = _buffer(addresses, other) + RANK * MAX_ROWS * half + slot
            tl.store(place, own, mask=mask)
    if HAS_RESIDUAL:
        low_stream = tl.load(residual + low_at, mask=mask, other=0.0).to(tl.float32)
        high_stream = tl.load(residual + high_at, mask=mask, other=0.0).to(tl.float32)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    received = _buffer(addresses, RANK) + slot
    for source in tl.static_range(SIZE):
        if source == RANK:
            words = own
        else:
            words = _arrived(received + source * MAX_ROWS * half, mask)
        low += _floats(words, dtype)
        high += _floats(words >> 16, dtype)
    low = low.to(dtype).to(tl.float32)
    high = high.to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        low = (low + low_stream).to(dtype).to(tl.float32)
        high = (high + high_stream).to(dtype).to(tl.float32)
    tl.store(total + low_at, low.to(dtype), mask=mask)
    tl.store(total + high_at, high.to(dtype), mask=mask)
    inverse = tl.rsqrt(tl.sum(low * low + high * high, 0) / E + eps)
    low = (low * inverse).to(weight.dtype.element_ty).to(tl.float32) * low_scale
    high = (high * inverse).to(weight.dtype.element_ty).to(tl.float32) * high_scale
    tl.store(out + low_at, low.to(dtype), mask=mask)
    tl.store(out + high_at, high.to(dtype), mask=mask)
    tl.store(counts + place_row, count + 1)


def all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    peers: PeerBuffers,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum a layer's output over the ranks, add it to the residual stream, and normalise.

    Args:
        x: this rank's part: [T, E], or [P, T, E] partials of any float dtype, summed in order of P.
        residual: [T, E], or None if the sum starts the stream. It is not changed.
        weight: [E], in the sum's dtype or fp32.
        eps: added to the mean square.
        peers: the ranks' buffers; more rows than they have go through them several at a time.
        dtype: of the sum where there is no residual, of 16 bits; None: weight's.

    Returns:
        The normalised sum [T, E] and the sum itself [T, E].
    """
    x = x.contiguous()
    num_rows, width = x.shape[-2:]
    dtype = sum_dtype(residual, weight, dtype)
    out = torch.empty(num_rows, width, dtype=dtype, device=x.device)
    total = torch.empty_like(out)
    assert width == peers.width, "the caller asks first"
    assert out.dtype in records.DTYPES, "the caller asks first"
    block, warps = _tile(width)
    stream = x if residual is None else residual.contiguous()
    for first in range(0, num_rows, peers.max_rows):
        all_reduce_add_rms_norm_kernel[(min(peers.max_rows, num_rows - first),)](
            x, stream, weight, out, total, peers.addresses, peers.counts, num_rows, first, eps,
            peers.rank, peers.size, peers.max_rows, width, block,
            x.shape[0] if x.dim() == 3 else 1, residual is not None,
            num_warps=warps, maxnreg=MAX_REGISTERS, **dependent_launch(x),
        )  # fmt: skip
    return out, total


def _tile(width: int) -> tuple[int, int]:
    """Words of half a row as a program holds them, and its warps: 4 words per thread, or more."""
    block = next_power_of_2(width // 2)
    return block, min(16, max(1, block // 128))
