"""Entries of one expert times rows of its quantized matrix, for the kernels of quantized experts.

Owns two loops over the columns, 128 at a time. Codes in groups are dequantized to the tokens' dtype
in registers, as `triton.quantized_grouped` does it. Codes of 8 bits multiply as they are; e4m3 and
the integers are exact in bf16, in which they multiply on cards without e4m3. The scales of tokens
and blocks come after each 128 columns, also where a token has one scale: there sums of e4m3, which
Hopper adds in about 14 bits, become fp32. Tokens are quantized when they are loaded, so that this
takes no launch.
"""

# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

import triton
import triton.language as tl

from nv_kernels.linear.quantized.triton_tokens import codes_of, quotient, scale_of
from nv_kernels.linear.triton.quantized_grouped import chunk_values, values_of_e4m3

HALF = tl.constexpr(64)
CHUNK = tl.constexpr(128)


@triton.jit
def grouped_sums(
    x, codes, scale, offset, matrix, first, sources, is_real, STRIDE,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    KIND: tl.constexpr, OFFSET: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Multiply by rows of a matrix, and of the next one if GATED: fp32, two [BLOCK_N, BLOCK_M].

    x [., K], of which rows `sources` [BLOCK_M] are read where is_real. N: rows of a matrix with
    padding; STRIDE: of all. The rest as in LaidOut.
    """
    CHUNKS: tl.constexpr = (K + 127) // 128
    dtype: tl.constexpr = x.dtype.element_ty
    half = tl.arange(0, HALF)
    x_at = x + sources[:, None] * K + half[None, :]
    row = first + tl.arange(0, BLOCK_N)
    unit = first // 16 + tl.arange(0, BLOCK_N // 16)
    row += matrix * N
    unit += matrix * (N // 16)
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
        start = chunk * 128
        if K % 128 == 0:
            mask_low = is_real[:, None]
            mask_high = is_real[:, None]
        else:
            mask_low = is_real[:, None] & (start + half < K)[None, :]
            mask_high = is_real[:, None] & (start + HALF + half < K)[None, :]
        x_low = tl.load(x_at + start, mask=mask_low, other=0.0)
        x_high = tl.load(x_at + start + HALF, mask=mask_high, other=0.0)
        low, high = chunk_values(
            codes, scale, offset, unit, row, chunk, STRIDE, CHUNKS, GROUP, GROUPS, KIND, OFFSET,
            BLOCK_N, ASM,
        )  # fmt: skip
        gate = tl.dot(low.to(dtype), x_low.T, gate, input_precision="ieee")
        gate = tl.dot(high.to(dtype), x_high.T, gate, input_precision="ieee")
        if GATED:
            low, high = chunk_values(
                codes, scale, offset, unit + N // 16, row + N, chunk, STRIDE, CHUNKS, GROUP, GROUPS,
                KIND, OFFSET, BLOCK_N, ASM,
            )  # fmt: skip
            up = tl.dot(low.to(dtype), x_low.T, up, input_precision="ieee")
            up = tl.dot(high.to(dtype), x_high.T, up, input_precision="ieee")
    return gate, up


@triton.jit
def _rounded(values, LARGEST: tl.constexpr, NATIVE: tl.constexpr, codes):
    """Round quotients to codes: in the codes' own type if NATIVE, else as fp32 values."""
    IS_INT: tl.constexpr = codes.dtype.element_ty == tl.int8
    if NATIVE or IS_INT:
        found = codes_of(values, LARGEST, IS_INT, tl.int8 if IS_INT else tl.float8e4nv)
        return found if NATIVE else found.to(tl.float32)
    else:
        return round_to_e4m3(values)


@triton.jit
def round_to_e4m3(values):
    """Round fp32 to the nearest e4m3, ties to even, at most 448 from 0, on every card: fp32."""
    values = tl.clamp(values, -448.0, 448.0)
    bits = values.to(tl.uint32, bitcast=True)
    sign = bits & 0x80000000
    size = bits ^ sign
    normal = (size + 0x7FFFF + ((size >> 20) & 1)) & 0xFFF00000
    # Below 2^-6 the steps are 2^-9, which are those of fp32 at 2^14 * 1.5.
    small = (tl.abs(values) + 24576.0) - 24576.0
    found = tl.where(tl.abs(values) < 0.015625, small.to(tl.uint32, bitcast=True), normal)
    return (found | sign).to(tl.float32, bitcast=True)


@triton.jit
def _weights(codes, row, columns, WIDTH: tl.constexpr, NATIVE: tl.constexpr, dtype: tl.constexpr):
    """Load codes [BLOCK_N, 128], as they are or exactly in the tokens' dtype."""
    found = tl.load(codes + row[:, None].to(tl.int64) * WIDTH + columns[None, :])
    if NATIVE:
        return found
    elif codes.dtype.element_ty == tl.uint8:
        return values_of_e4m3(found).to(dtype)
    else:
        return found.to(tl.float32).to(dtype)


@triton.jit
def _product(weights, tokens, NATIVE: tl.constexpr):
    """Multiply [BLOCK_N, 128] by [BLOCK_M, 128]: fp32 [BLOCK_N, BLOCK_M]."""
    if NATIVE and weights.dtype == tl.int8:
        return tl.dot(weights, tokens.T, out_dtype=tl.int32).to(tl.float32)
    elif NATIVE:
        return tl.dot(weights, tokens.T)
    else:
        return tl.dot(weights, tokens.T, input_precision="ieee")


@triton.jit
def _row_scale(
    scale, matrix, first, N: tl.constexpr, BLOCKS: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return pointers to the scales of rows: of each, or of their first blocks of 128 columns."""
    row = first + tl.arange(0, BLOCK_N)
    if BLOCKS > 0:
        return scale + (matrix * BLOCKS + row // 128) * ((K + 127) // 128)
    else:
        return scale + matrix * N + row


@triton.jit
def coded_sums(
    x, codes, scale, fixed, matrix, first, sources, is_real,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, BLOCKS: tl.constexpr, INPUTS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Multiply by rows of codes of 8 bits, and of the next matrix if GATED; see `grouped_sums`.

    codes: e4m3 (as bytes if not NATIVE) or int8, rows and columns padded. scale: of each row, or of
    BLOCKS blocks of 128 rows per matrix, by 128 columns. INPUTS: how x is quantized, "none",
    "token", "block" or "fixed", which is its scale.
    """
    CHUNKS: tl.constexpr = (K + 127) // 128
    LARGEST: tl.constexpr = 127.5 if codes.dtype.element_ty == tl.int8 else 448.0
    dtype: tl.constexpr = x.dtype.element_ty
    columns = tl.arange(0, CHUNK)
    x_at = x + sources[:, None] * K + columns[None, :]
    row = matrix * N + first + tl.arange(0, BLOCK_N)
    gate_scale = _row_scale(scale, matrix, first, N, BLOCKS, K, BLOCK_N)
    up_scale = _row_scale(scale, matrix + 1, first, N, BLOCKS, K, BLOCK_N)
    x_scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if INPUTS == "fixed":
        x_scale *= fixed
    if INPUTS == "token":
        largest = tl.zeros([BLOCK_M], tl.float32)
        for chunk in tl.range(0, CHUNKS):
            mask = is_real[:, None] & (chunk * 128 + columns < K)[None, :]
            values = tl.load(x_at + chunk * 128, mask=mask, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(values), 1))
        x_scale = scale_of(largest, LARGEST)
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
        mask = is_real[:, None] & (chunk * 128 + columns < K)[None, :]
        tokens = tl.load(x_at + chunk * 128, mask=mask, other=0.0)
        if INPUTS != "none":
            values = tokens.to(tl.float32)
            if INPUTS == "block":
                x_scale = scale_of(tl.max(tl.abs(values), 1), LARGEST)
            tokens = _rounded(quotient(values, x_scale[:, None]), LARGEST, NATIVE, codes)
            if not NATIVE:
                tokens = tokens.to(dtype)
        weights = _weights(codes, row, chunk * 128 + columns, CHUNKS * 128, NATIVE, dtype)
        product = _product(weights, tokens, NATIVE)
        if BLOCKS > 0:
            product *= tl.load(gate_scale + chunk)[:, None]
        if INPUTS != "none":
            product *= x_scale[None, :]
        gate += product
        if GATED:
            weights = _weights(codes, row + N, chunk * 128 + columns, CHUNKS * 128, NATIVE, dtype)
            product = _product(weights, tokens, NATIVE)
            if BLOCKS > 0:
                product *= tl.load(up_scale + chunk)[:, None]
            if INPUTS != "none":
                product *= x_scale[None, :]
            up += product
    if BLOCKS == 0:
        gate *= tl.load(gate_scale)[:, None]
        if GATED:
            up *= tl.load(up_scale)[:, None]
    return gate, up
