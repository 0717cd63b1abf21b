"""Tokens times a weight-only quantized weight: a tile of the weight is dequantized in registers.

Runs on every card and in the interpreter, for every number of tokens. Weight rows are on the tensor
cores' long side, so the dequantized tile is their left operand, which stays in registers; tokens
are on the other. A value is rounded to x's dtype as `dense` rounds it. `dequantize` writes the
whole matrix for the library, which is faster for many tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.linear.triton.quantized_layout import CHUNK, UNPACK_WORD, LaidOut
from nv_kernels.linear.triton.result import empty_result

if TYPE_CHECKING:
    from nv_kernels.linear.quantized.tuned import Tile

gdc_launch = tl.extra.cuda.gdc_launch_dependents
gdc_wait = tl.extra.cuda.gdc_wait
HALF = tl.constexpr(64)  # columns of half a chunk
UNPACK = tl.constexpr(UNPACK_WORD + "}")


@triton.jit
def _bytes_of_units(codes, units, chunk, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load a chunk of codes of 4 bits: [BLOCK_N, 64] bytes, from units of 16 rows."""
    at = (units[:, None].to(tl.int64) * CHUNKS + chunk) * 1024 + tl.arange(0, 1024)[None, :]
    packed = tl.load(codes + at)
    bits = tl.reshape(packed, (BLOCK_N // 16, 2, 8, 4, 2, 2, 2, 2))
    return tl.reshape(tl.permute(bits, (0, 6, 2, 1, 4, 5, 3, 7)), (BLOCK_N, HALF))


@triton.jit
def values_of_e4m3(codes):
    """Return the values of e4m3 codes in fp32, by integer operations that every card has."""
    bits = codes.to(tl.uint32)
    size = ((bits & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where(bits > 127, -size, size)


@triton.jit
def _by_columns(values, rows, first, GROUP: tl.constexpr, GROUPS: tl.constexpr, STRIDE):
    """Load [G, rows] numbers for 64 columns from `first` on: fp32 [rows, 64] or [rows, 1]."""
    if GROUP < HALF:
        groups: tl.constexpr = HALF // GROUP
        each = tl.minimum(first // GROUP + tl.arange(0, groups), GROUPS - 1)
        at = each[None, :].to(tl.int64) * STRIDE + rows[:, None]
        found = tl.load(values + at).to(tl.float32)[:, :, None]
        spread = tl.broadcast_to(found, (rows.shape[0], groups, GROUP))
        return tl.reshape(spread, (rows.shape[0], HALF))
    else:
        group = tl.minimum(first // GROUP, GROUPS - 1).to(tl.int64)
        return tl.load(values + group * STRIDE + rows).to(tl.float32)[:, None]


@triton.jit
def _half_chunk(
    q, scale, offset, rows, first, STRIDE,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr,
    ADDED: tl.constexpr,
):  # fmt: skip
    """Return fp32 values [rows, 64] of codes in fp32; 4 bits have ADDED added."""
    scales = _by_columns(scale, rows, first, GROUP, GROUPS, STRIDE)
    if KIND == "e4m3":
        return q * scales
    elif OFFSET == "none":
        middle: tl.constexpr = (8 if KIND == "4" else 128) + ADDED
        return (q - middle) * scales
    elif OFFSET == "zeros":
        if KIND == "4":  # bf16 of 128 + zero, as 16 bits
            bits = offset.to(tl.pointer_type(tl.bfloat16))
            zeros = _by_columns(bits, rows, first, GROUP, GROUPS, STRIDE) - (128 - ADDED)
        else:
            zeros = _by_columns(offset, rows, first, GROUP, GROUPS, STRIDE)
        return (q - zeros) * scales
    else:
        added = _by_columns(offset, rows, first, GROUP, GROUPS, STRIDE)
        return (q - ADDED) * scales + added


@triton.jit
def chunk_values(
    codes, scale, offset, units, rows, chunk, STRIDE,
    CHUNKS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, BLOCK_N: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Load and dequantize columns 0 to 63 and 64 to 127 of a chunk: fp32 [BLOCK_N, 64] each."""
    first = chunk * (2 * HALF)
    if KIND == "4":
        q = _bytes_of_units(codes, units, chunk, CHUNKS, BLOCK_N)
        if ASM:
            low, high = tl.inline_asm_elementwise(
                UNPACK, "=&r,=&r,=&r,=&r,r", [q], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
                pack=4,
            )  # fmt: skip
        else:
            low = q & 15
            high = q >> 4
    else:
        at = rows[:, None].to(tl.int64) * (CHUNKS * 2 * HALF) + first
        at += tl.arange(0, HALF)[None, :]
        low = tl.load(codes + at)
        high = tl.load(codes + at + HALF)
    if KIND == "e4m3":
        low = values_of_e4m3(low)
        high = values_of_e4m3(high)
    ADDED: tl.constexpr = 128 if KIND == "4" and ASM else 0
    low = _half_chunk(
        low.to(tl.float32), scale, offset, rows, first, STRIDE, GROUP, GROUPS, KIND, OFFSET, ADDED
    )
    high = _half_chunk(
        high.to(tl.float32), scale, offset, rows, first + HALF, STRIDE, GROUP, GROUPS, KIND, OFFSET,
        ADDED,
    )  # fmt: skip
    return low, high


@triton.jit
def _part(
    x_at, codes, scale, offset, units, rows, first, STRIDE,
    K: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Sum STEPS chunks from `first` on: fp32 [BLOCK_N, BLOCK_M]."""
    dtype: tl.constexpr = x_at.dtype.element_ty
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    column = tl.arange(0, HALF)[:, None]
    for chunk in tl.range(first, tl.minimum(first + STEPS, CHUNKS), num_stages=STAGES):
        start = chunk * (2 * HALF)
        if K % 128 == 0:
            x_low = tl.load(x_at + start)
            x_high = tl.load(x_at + start + HALF)
        else:
            x_low = tl.load(x_at + start, mask=start + column < K, other=0.0)
            x_high = tl.load(x_at + start + HALF, mask=start + HALF + column < K, other=0.0)
        low, high = chunk_values(
            codes, scale, offset, units, rows, chunk, STRIDE, CHUNKS, GROUP, GROUPS, KIND, OFFSET,
            BLOCK_N, ASM,
        )  # fmt: skip
        sums = tl.dot(low.to(dtype), x_low, sums, input_precision="ieee")
        sums = tl.dot(high.to(dtype), x_high, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["M"])
def grouped_kernel(
    x, codes, scale, offset, bias, out, M, N, STRIDE,
    K: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr, PARTS_EACH: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a [BLOCK_M, BLOCK_N] tile over PARTS_EACH parts of STEPS chunks each.

    x [M, K]; the rest as in LaidOut; STRIDE rows with padding. GATED: blocks of 32 gate rows and
    the 32 up rows that belong to them. BAND tiles of tokens use the same rows at the same time.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    band = tile // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    inside = tile % (BAND * tiles_n)
    tokens = (band * BAND + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile_n = inside // height
    unit = tl.arange(0, BLOCK_N // 16)
    at = tl.arange(0, BLOCK_N)
    outputs = tile_n * BLOCK_N + at
    if GATED:
        units = tile_n * (BLOCK_N // 32) + unit // 4 * 2 + unit % 2 + unit // 2 % 2 * (N // 32)
        rows = tile_n * (BLOCK_N // 2) + at // 64 * 32 + at % 32 + at // 32 % 2 * (N // 2)
    else:
        units = tl.minimum(tile_n * (BLOCK_N // 16) + unit, STRIDE // 16 - 1)
        rows = tl.minimum(outputs, STRIDE - 1)
    # Rows past the last read real rows, each another one, and are not stored.
    x_at = x + (tokens % M).to(tl.int64)[None, :] * K + tl.arange(0, HALF)[:, None]
    if PDL:
        gdc_wait()
        gdc_launch()
    first = tl.program_id(1) * PARTS_EACH
    if PARTS_EACH == 1:
        sums = _part(
            x_at, codes, scale, offset, units, rows, first * STEPS, STRIDE, K, CHUNKS, STEPS, GROUP,
            GROUPS, KIND, OFFSET, BLOCK_M, BLOCK_N, STAGES, ASM,
        )  # fmt: skip
    else:
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for part in range(first, first + PARTS_EACH):
            sums += _part(
                x_at, codes, scale, offset, units, rows, part * STEPS, STRIDE, K, CHUNKS, STEPS,
                GROUP, GROUPS, KIND, OFFSET, BLOCK_M, BLOCK_N, STAGES, ASM,
            )  # fmt: skip
    sums = tl.trans(sums)
    dtype: tl.constexpr = out.dtype.element_ty
    if GATED:
        pairs = tl.permute(tl.reshape(sums, (BLOCK_M, BLOCK_N // 64, 2, 32)), (0, 1, 3, 2))
        gate, up = tl.split(pairs)
        y = tl.reshape(gate * tl.sigmoid(gate) * up, (BLOCK_M, BLOCK_N // 2))
        features = tile_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        place = tokens[:, None].to(tl.int64) * (N // 2) + features[None, :]
        mask = (tokens < M)[:, None] & (features < N // 2)[None, :]
        tl.store(out + place, y.to(dtype), mask=mask)
    else:
        if BIAS:
            sums += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
        place = (tl.program_id(1) * tl.cast(M, tl.int64) + tokens[:, None]) * N + outputs[None, :]
        mask = (tokens < M)[:, None] & (outputs < N)[None, :]
        tl.store(out + place, sums.to(dtype), mask=mask)


@triton.jit
def dequantize_kernel(
    codes, scale, offset, out, N, STRIDE,
    K: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    KIND: tl.constexpr, OFFSET: tl.constexpr, BLOCK_N: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write one chunk of BLOCK_N rows of the values: out [N, K]."""
    if PDL:
        gdc_launch()
    chunk = tl.program_id(0)
    tile = tl.program_id(1)
    units = tl.minimum(tile * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16), STRIDE // 16 - 1)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    low, high = chunk_values(
        codes, scale, offset, units, tl.minimum(outputs, STRIDE - 1), chunk, STRIDE, CHUNKS, GROUP,
        GROUPS, KIND, OFFSET, BLOCK_N, ASM,
    )  # fmt: skip
    columns = chunk * (2 * HALF) + tl.arange(0, HALF)
    place = outputs[:, None].to(tl.int64) * K + columns[None, :]
    is_row = (outputs < N)[:, None]
    dtype: tl.constexpr = out.dtype.element_ty
    if PDL:
        gdc_wait()
    tl.store(out + place, low.to(dtype), mask=is_row & (columns < K)[None, :])
    tl.store(out + place + HALF, high.to(dtype), mask=is_row & (columns + HALF < K)[None, :])


def grouped(
    form: Tile,
    x: torch.Tensor,
    weight: LaidOut,
    *,
    gated: bool = False,
    bias: torch.Tensor | None = None,
    spread: bool = True,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply tokens by a weight.

    Args:
        form: the settings; the kernel's columns per step are 128.
        x: [T, K] contiguous, columns in the codes' order.
        weight: [N, K], or [2F, K] (gate rows, then up rows) where gated; then 32 divides F.
        gated: return silu(gate) * up, [T, F]; split_k is ignored.
        bias: [N] or None; not with partials.
        spread: a program per part of K, whose partials are returned; else a program sums all.
        dtype: of the result, x's by default; partials are fp32.

    Returns:
        [T, N] or [T, F]; [P, T, N] partials if the form splits K and they are spread.
    """
    tokens, rows = x.shape[0], weight.num_rows
    stride, columns = weight.padded
    chunks = columns // CHUNK
    steps = cdiv(chunks, 1 if gated else form.split_k)
    parts = cdiv(chunks, steps)  # no part is empty
    programs = parts if spread else 1
    outputs = rows // 2 if gated else rows
    out = empty_result(programs, tokens, outputs, dtype or x.dtype, x.device)
    if tokens:
        grid = (cdiv(tokens, form.block_m) * cdiv(rows, form.block_n), programs)
        grouped_kernel[grid](
            x, *_tensors(weight), x if bias is None else bias, out, tokens, rows, stride,
            weight.num_columns, chunks, steps, parts // programs, *constants_of(weight),
            form.block_m, form.block_n, form.band, form.stages, gated, bias is not None, x.is_cuda,
            num_warps=form.warps, **dependent_launch(x),
        )  # fmt: skip
    return out


def dequantize(weight: LaidOut, dtype: torch.dtype) -> torch.Tensor:
    """Write the values [N, K], columns in the codes' order."""
    rows, columns = weight.num_rows, weight.num_columns
    stride, padded = weight.padded
    out = torch.empty(rows, columns, dtype=dtype, device=weight.codes.device)
    grid = (padded // CHUNK, cdiv(rows, 64))
    dequantize_kernel[grid](
        *_tensors(weight), out, rows, stride, columns, padded // CHUNK, *constants_of(weight), 64,
        out.is_cuda, num_warps=4, **dependent_launch(out),
    )  # fmt: skip
    return out


def _tensors(weight: LaidOut) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    offset = weight.scale if weight.offset is None else weight.offset
    return weight.codes, weight.scale, offset


def constants_of(weight: LaidOut) -> tuple[int, int, str, str]:
    """Return a kernel's GROUP, GROUPS, KIND and OFFSET."""
    groups = weight.scale.shape[0]
    group = next_power_of_2(weight.padded[1]) if groups == 1 else weight.group
    offset = "none" if weight.offset is None else "zeros" if weight.has_zeros else "floats"
    return group, groups, weight.kind, offset
