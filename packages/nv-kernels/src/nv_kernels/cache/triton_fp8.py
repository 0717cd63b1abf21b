"""Reads e4m3 keys and values in pairs: 16 bits at a time, split into two fp16 tiles.

The caller loads int16 tiles, which have the layouts of 16-bit operands, and multiplies by the 2**8
that these functions omit.

An e4m3 byte moved into fp16's sign, exponent and mantissa fields is its value times 2**-8,
exactly, subnormals included (NaN becomes 480, but a cache never holds one).
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def even_fp8(pairs):
    """Return the low bytes of int16 pairs of e4m3 as fp16, times 2**-8."""
    if INTERPRETED:
        bits = ((pairs << 7) & 0x3F80) | ((pairs << 8) & -32768)
        return bits.to(tl.int16).to(tl.float16, bitcast=True)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 magnitude, sign;
        shl.b32 magnitude, $1, 7;
        shl.b32 sign, $1, 8;
        and.b32 sign, sign, 0x80008000;
        lop3.b32 $0, magnitude, 0x3F803F80, sign, 0xEA;
        }""",
        "=r,r",
        [pairs],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def odd_fp8(pairs):
    """Return the high bytes of int16 pairs of e4m3 as fp16, times 2**-8."""
    if INTERPRETED:
        bits = ((pairs >> 1) & 0x3F80) | (pairs & -32768)
        return bits.to(tl.int16).to(tl.float16, bitcast=True)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 magnitude, sign;
        shr.u32 magnitude, $1, 1;
        and.b32 sign, $1, 0x80008000;
        lop3.b32 $0, magnitude, 0x3F803F80, sign, 0xEA;
        }""",
        "=r,r",
        [pairs],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def both_fp8(pairs, CONVERT: tl.constexpr):
    """Return the low and the high bytes of int16 pairs of e4m3 as fp16.

    CONVERT: return the values themselves, by an instruction that cards from sm_89 on have.
    Otherwise return them times 2**-8.
    """
    if not CONVERT:
        return even_fp8(pairs), odd_fp8(pairs)
    if INTERPRETED:
        return even_fp8(pairs) * 256.0, odd_fp8(pairs) * 256.0
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sorted;
        .reg .b16 low, high;
        prmt.b32 sorted, $2, 0, 0x3120;
        mov.b32 {low, high}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
