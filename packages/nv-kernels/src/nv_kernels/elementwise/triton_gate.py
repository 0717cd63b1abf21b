"""The gated activation of the feed-forward layer.

It is for matrix products that do not fuse the gate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nv_kernels.elementwise import gate as definitions
from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv

gdc_launch = tl.extra.cuda.gdc_launch_dependents
gdc_wait = tl.extra.cuda.gdc_wait
BLOCK = 1024
GELU_SCALE = tl.constexpr(definitions.GELU_SCALE)


@triton.jit
def gate_kernel(
    x, out, F: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr
):
    """One program per row and BLOCK columns."""
    if PDL:
        gdc_launch()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    gate = tl.load(x + row * 2 * F + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + cols, mask=mask, other=0.0).to(tl.float32)
    inner = gate
    if GELU:
        inner = GELU_SCALE * gate * (1.0 + 0.044715 * gate * gate)
    gate = (gate * tl.sigmoid(inner)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * F + cols, (gate * up).to(out.dtype.element_ty), mask=mask)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate the second half of each row with the SiLU of the first.

    Args:
        x: [T, 2F] bf16, fp16 or fp32, gate then up.

    Returns:
        [T, F] in x's dtype.
    """
    return _gated(x, gelu=False)


batch_invariant_silu_and_mul = silu_and_mul  # each element is computed alone


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate the second half of each row with the GELU of the first, in its tanh form.

    Args:
        x: [T, 2F] bf16, fp16 or fp32, gate then up.

    Returns:
        [T, F] in x's dtype.
    """
    return _gated(x, gelu=True)


def _gated(x: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    x = x.contiguous()
    num_rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    if num_rows:
        gate_kernel[(num_rows, cdiv(width, BLOCK))](
            x, out, width, BLOCK, gelu, num_warps=4, **dependent_launch(x)
        )
    return out
