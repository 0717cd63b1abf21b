"""The gate of an expert in the epilogue of a product; see `nv_kernels.linear.experts.gate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from nv_kernels.linear.experts.gate import SWIGLU

if TYPE_CHECKING:
    from nv_kernels.linear.experts.gate import Gate


@triton.jit
def gated(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """Gate sums in fp32, without rounding between; a NaN stays NaN."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if SHIFT != 0:
        up += SHIFT
    return gate * tl.sigmoid(ALPHA * gate) * up


def constants(gate: Gate | None) -> tuple[bool, float, float | None, float]:
    """Return a kernel's GATED, ALPHA, LIMIT and SHIFT; None is a product without a gate."""
    used = gate or SWIGLU
    return gate is not None, used.alpha, used.limit, used.shift
