"""Tokens quantized for a product by quantized weights: to e4m3 or to 8-bit integers."""

from __future__ import annotations

import torch

from nv_kernels.op import op

E4M3_MAX = 448.0
BLOCK = 128  # columns per scale of x, and rows and columns per scale of a weight


@op(triton="nv_kernels.linear.quantized.triton_tokens")
def quantize_tokens_fp8(
    x: torch.Tensor, inputs: str | float = "token"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row to e4m3 (Micikevicius et al. 2022, arXiv 2209.05433).

    A row's result does not depend on the other rows. A scale that would be 0 is 1.

    Args:
        x: [T, K].
        inputs: "token": each row has a scale, its largest |x| / 448. "block": so has each group of
            128 columns of a row; the last group may be shorter. A number: the scale itself.

    Returns:
        Codes [T, K] e4m3, x / scale rounded to nearest even, at most 448 from 0; and scales
        [T, G] fp32: G is 1, or ceil(K / 128).
    """
    values = x.float()
    if isinstance(inputs, float):
        scale = torch.full((x.shape[0], 1), inputs, dtype=torch.float32, device=x.device)
    elif inputs == "block":
        groups = -(-x.shape[1] // BLOCK)
        padded = torch.nn.functional.pad(values, (0, groups * BLOCK - x.shape[1]))
        scale = _scale(padded.view(x.shape[0], groups, BLOCK), E4M3_MAX)
    else:
        scale = _scale(values, E4M3_MAX)[:, None]
    return to_e4m3(values / by_columns(scale, x.shape[1])), scale


@op(triton="nv_kernels.linear.quantized.triton_tokens")
def quantize_tokens_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row to 8-bit integers; a row's result does not depend on the other rows.

    Args:
        x: [T, K].

    Returns:
        Codes [T, K] int8: x / scale rounded to nearest even, from -128 to 127; and scales [T, 1]
        fp32: a row's largest |x| / 127.5, or 1 if that is 0.
    """
    values = x.float()
    scale = _scale(values, 127.5)[:, None]
    return (values / scale).round().clamp(-128, 127).to(torch.int8), scale


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round to e4m3, at most 448 from 0. Without the clamp, larger values would become NaN."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def by_columns(scale: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Repeat scales of groups of 128 columns, [T, G], to [T, K]; one scale per row stays [T, 1]."""
    if scale.shape[1] == 1:
        return scale
    return scale.repeat_interleave(BLOCK, dim=1)[:, :num_columns]


def _scale(values: torch.Tensor, largest: float) -> torch.Tensor:
    """Return the scale of each last dimension; fp32, which has no values between in one of 0s."""
    scale = values.abs().amax(-1) / largest
    return torch.where(scale == 0, 1.0, scale)
