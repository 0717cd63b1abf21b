"""Triton kernels on a CPU: the interpreter, with bf16 and dots corrected, in a process of its own.

A test module of kernels uses DEVICE and `on_device`, and calls `run_interpreted(__file__)` in one
test of the outer process. Its other tests then run twice: here under TRITON_INTERPRET=1 on small
sizes, and on a card.
"""

import os

import numpy as np
import pytest
import torch
from interpreter_process import running_interpreter

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETING else "cuda"


def on_device(test):
    """Run a test in the interpreter, or on a card."""
    return test if INTERPRETING else pytest.mark.gpu(test)


outer_only = pytest.mark.skipif(INTERPRETING, reason="starts the interpreter")


def run_interpreted(module: str) -> None:
    """Run a test module's device tests in the interpreter; fail with its output."""
    code, output = running_interpreter().run(module)
    assert code == 0, f"exit code {code}\n{output[-8000:]}"
    assert " passed" in output, output


def _nearest_bfloat16(data):
    """Return the bits of fp32 values rounded to bf16, ties to even."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    finite = (bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
    return np.where(finite, rounded, bits >> 16).astype(np.uint16)


def mend_interpreter() -> None:
    """Patch the interpreter so that it computes as a card does.

    bf16 is computed in fp32 and rounded to nearest: without the patch the interpreter works on the
    raw bits and truncates. e4m3 is rounded to nearest, ties to even. Dots are computed in fp64 and
    rounded to fp32: in fp32, NumPy's BLAS may sum a row in an order that depends on its place in
    the tile, and a card does not.
    """
    import triton.language as tl  # noqa: PLC0415
    from triton.runtime import interpreter as inner  # noqa: PLC0415

    builder = inner.InterpreterBuilder
    if hasattr(builder, "mended"):
        return
    plain_binary = builder.binary_op
    plain_convert = inner._convert_float

    def convert(data, source, target, rounding):
        if (source, target) == (tl.float32, tl.bfloat16):
            return _nearest_bfloat16(data)
        if (source, target) == (tl.float32, tl.float8e4nv):
            single = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
            return single.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return plain_convert(data, source, target, rounding)

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        values = inner._convert_float(handle.data, tl.bfloat16, tl.float32, None)
        return inner.TensorHandle(values.view(np.float32), tl.float32)

    def in_fp64(handle):
        if handle.dtype.scalar in (tl.float16, tl.float32, tl.int8):
            return handle.data.astype(np.float64)
        single = inner._convert_float(handle.data, handle.dtype.scalar, tl.float32, None)
        return single.view(np.float32).astype(np.float64)

    def create_dot(self, a, b, d, *_):
        product = np.matmul(in_fp64(a), in_fp64(b)).astype(d.data.dtype)
        return inner.TensorHandle(product + d.data, d.dtype.scalar)

    def binary_op(self, left, right, op):
        if left.dtype.scalar != tl.bfloat16 or right.dtype.scalar != tl.bfloat16:
            return plain_binary(self, left, right, op)
        result = plain_binary(self, widened(left), widened(right), op)
        if result.data.dtype == np.bool_:
            return result
        data = result.data.astype(np.float32)
        narrow = inner._convert_float(data, tl.float32, tl.bfloat16, None).view(np.uint16)
        return inner.TensorHandle(narrow, left.dtype.scalar)

    inner._convert_float = convert
    builder.create_dot, builder.binary_op = create_dot, binary_op
    builder.mended = True


if INTERPRETING:
    from quick_interpreter import quicken_interpreter

    mend_interpreter()
    quicken_interpreter()
