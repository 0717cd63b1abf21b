"""The gated activation of the feed-forward layer."""

from __future__ import annotations

import torch
from torch.nn import functional

from nv_kernels.op import op

GELU_SCALE = 1.5957691216057308  # 2 sqrt(2 / pi)


@op(triton="nv_kernels.elementwise.triton_gate", cpp="nv_kernels.cpp.elementwise")
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate the second half of each row with the SiLU of the first (Shazeer, 2020).

    Args:
        x: [T, 2F], gate then up. The SiLU is rounded to x's dtype before it multiplies.

    Returns:
        [T, F] in x's dtype.
    """
    if x.dtype == torch.float32:
        return batch_invariant_silu_and_mul.definition(x)
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


@op(triton="nv_kernels.elementwise.triton_gate", cpp="nv_kernels.cpp.elementwise")
def batch_invariant_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate as `silu_and_mul`, bitwise the same whatever the other rows are.

    torch's own SiLU uses another exponential for the last elements of each thread's share, and
    these may lie in any row.

    Args:
        x: [T, 2F], gate then up. The SiLU is rounded to x's dtype before it multiplies.

    Returns:
        [T, F] in x's dtype.
    """
    gate, up = x.chunk(2, dim=-1)
    gate = gate.float()
    silu = torch.neg(gate).exp_().add_(1.0)
    torch.div(gate, silu, out=silu)
    return silu.to(x.dtype).mul_(up)


@op(triton="nv_kernels.elementwise.triton_gate", cpp="nv_kernels.cpp.elementwise")
def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate the second half of each row with the GELU of the first, in its tanh form (Gemma).

    GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415) is g sigmoid(2 sqrt(2/pi) (g + 0.044715
    g^3)). A row's bits do not depend on the other rows.

    Args:
        x: [T, 2F], gate then up. The GELU is rounded to x's dtype before it multiplies.

    Returns:
        [T, F] in x's dtype.
    """
    gate, up = x.chunk(2, dim=-1)
    gate = gate.float()
    inner = gate * gate
    inner = inner.mul_(0.044715).add_(1.0).mul_(gate).mul_(-GELU_SCALE)
    gelu = torch.div(gate, inner.exp_().add_(1.0))
    return gelu.to(x.dtype).mul_(up)
