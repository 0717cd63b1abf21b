"""Weights in 8-bit integers, with a scale per row, for tokens in 8-bit integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nv_kernels.linear.quantized.record import ByRows
from nv_kernels.linear.quantized.tokens import quantize_tokens_int8

if TYPE_CHECKING:
    from nv_kernels.linear.quantized.record import Multiply

EXACT_COLUMNS = 1024  # of integers of 8 bits, whose products fp32 adds exactly: 1024 * 2^14 = 2^24


@dataclass(frozen=True)
class Int8(ByRows):
    """Codes from -128 to 127; the product quantizes each token, for every number of tokens.

    Attributes:
        codes: [N, K] int8.
        scale: [N] fp32; a value is code * scale.
    """

    codes: torch.Tensor
    scale: torch.Tensor

    def __post_init__(self) -> None:
        """Refuse tensors that do not fit together."""
        if tuple(self.scale.shape) != (self.shape[0],):
            raise ValueError(
                f"scale has shape {tuple(self.scale.shape)}: for codes {self.shape} it must be "
                f"({self.shape[0]},)"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """See `Quantized.shape`."""
        return self.codes.shape[0], self.codes.shape[1]

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """See `Quantized.dense`."""
        return (self.codes.float() * self.scale[:, None]).to(dtype)

    def product(
        self, x: torch.Tensor, multiply: Multiply, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `Quantized.product`. Sums of integers are exact; the scales come last."""
        codes, x_scale = quantize_tokens_int8(x)
        sums = torch.zeros(x.shape[0], self.shape[0], dtype=torch.int32, device=x.device)
        for first in range(0, x.shape[1], EXACT_COLUMNS):
            part = slice(first, first + EXACT_COLUMNS)
            left, right = codes[:, part].float(), self.codes[:, part].float()
            sums += multiply(left, right, None).int()
        out = sums.float() * (x_scale * self.scale)
        return out if bias is None else out + bias.float()
