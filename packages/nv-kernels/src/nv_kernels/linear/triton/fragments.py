"""Device functions for products that one warp issues alone, with operands in words of two bf16.

Layouts have a warp's 32 threads as 8 lines of 4. A thread's operands of `multiply` are those of
mma.sync's m16n8k16: of the left one the rows `line` and `line + 8`, of the right one the column
`line`.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl

MULTIPLY = gl.constexpr("""
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
        {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};
""")


@gluon.jit
def multiply(a, b, c, d, low, high, sums):
    """Add a product of 16 rows, 8 columns and a depth of 16 to a thread's 4 sums.

    a, c: the upper row's words; b, d: the lower row's; low, high: the column's.
    """
    return gl.inline_asm_elementwise(
        MULTIPLY, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a, b, c, d, low, high, sums[0], sums[1], sums[2], sums[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def times(x, y):
    """Multiply words, each product rounded to bf16."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def low_half(word):
    """Return a word's low half in fp32."""
    return (word << 16).to(gl.float32, bitcast=True)


@gluon.jit
def high_half(word):
    """Return a word's high half in fp32."""
    return (word & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def four(values, layout: gl.constexpr):
    """Split the last dimension, of 4 in one thread."""
    first, second = gl.split(values.reshape(values.shape[:-1] + [2, 2]))
    a, c = gl.split(first)
    b, d = gl.split(second)
    return (
        gl.convert_layout(a, layout, assert_trivial=True),
        gl.convert_layout(b, layout, assert_trivial=True),
        gl.convert_layout(c, layout, assert_trivial=True),
        gl.convert_layout(d, layout, assert_trivial=True),
    )


@constexpr_function
def only(layout, rank, dim):
    """Slice a layout until one of its dimensions is left."""
    for other in reversed(range(rank)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def along(dim: gl.constexpr, size: gl.constexpr, layout: gl.constexpr, rank: gl.constexpr):
    """Return 0 to size - 1 along one of a layout's dimensions, 1 along the others."""
    values = gl.arange(0, size, only(layout, rank, dim))
    for other in gl.static_range(rank):
        if other != dim:
            values = gl.expand_dims(values, other)
    return values
