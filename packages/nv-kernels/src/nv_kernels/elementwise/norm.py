"""RMS normalisation, alone and with the residual addition before it.

Owns the rounding points: fp32 inside, rounded to the weight's dtype before the weight multiplies. A
weight in the input's dtype is transformers' LlamaRMSNorm and Qwen3RMSNorm; a weight in fp32 rounds
once, at the end, as their Gemma2RMSNorm and Olmo2RMSNorm. Never writes to its inputs.
"""

from __future__ import annotations

import torch

from nv_kernels.op import op


@op(triton="nv_kernels.elementwise.triton_norm", cpp="nv_kernels.cpp.elementwise")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each vector by its root mean square and scale it (Zhang and Sennrich, 2019).

    Args:
        x: [..., E].
        weight: [E], in x's dtype or fp32.
        eps: added to the mean square.

    Returns:
        [..., E] in x's dtype.
    """
    x_fp32 = x.float()
    variance = x_fp32.pow(2).mean(-1, keepdim=True)
    return (weight * (x_fp32 * torch.rsqrt(variance + eps)).to(weight.dtype)).to(x.dtype)


@op(triton="nv_kernels.elementwise.triton_norm", cpp="nv_kernels.cpp.elementwise")
def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a layer's output to the residual stream and normalise the sum.

    Args:
        x: [T, E], or [P, T, E] split-K partials, which are summed in fp32 and rounded
            first: to residual's dtype, or else to `dtype`.
        residual: [T, E], or None if x starts the stream. It is not changed.
        weight: [E], in the sum's dtype or fp32.
        eps: added to the mean square.
        dtype: of the sum where x is partials without a residual; None: weight's.

    Returns:
        The normalised sum [T, E] and the sum itself [T, E], the new residual (x itself if
        residual is None and x is not split into partials).
    """
    if x.dim() == 3:
        x = x.sum(0, dtype=torch.float32).to(sum_dtype(residual, weight, dtype))
    total = x if residual is None else x + residual
    return rms_norm.definition(total, weight, eps), total


def sum_dtype(
    residual: torch.Tensor | None, weight: torch.Tensor, dtype: torch.dtype | None
) -> torch.dtype:
    """Return the dtype of a norm's sum: residual's; without one `dtype`, or else weight's."""
    return dtype or weight.dtype if residual is None else residual.dtype
