"""Weights in e4m3, with a scale per row or per block of 128 by 128, as DeepSeek-V3 has them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from nv_kernels.linear.quantized.record import Quantized, check_columns, common
from nv_kernels.linear.quantized.tokens import (
    BLOCK,
    E4M3_MAX,
    by_columns,
    quantize_tokens_fp8,
    to_e4m3,
)
from nv_kernels.op import op

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from nv_kernels.linear.quantized.record import Multiply


@dataclass(frozen=True)
class Fp8(Quantized):
    """Codes in e4m3; the product quantizes x as the record has it, for every number of tokens.

    Attributes:
        codes: [N, K] e4m3.
        scale: fp32, [N], or [ceil(N / 128), ceil(K / 128)] of blocks; a value is code * scale.
        inputs: how x is quantized: "token", "block" or a scale, as `quantize_tokens_fp8` takes it;
            None: not at all.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    inputs: str | float | None

    def __post_init__(self) -> None:
        """Refuse tensors that do not fit together."""
        rows, columns = self.shape
        wanted = ((rows,), (-(-rows // BLOCK), -(-columns // BLOCK)))
        if tuple(self.scale.shape) not in wanted:
            raise ValueError(
                f"scale has shape {tuple(self.scale.shape)}: for codes {self.shape} it must be "
                f"{wanted[0]} or {wanted[1]}"
            )
        if not isinstance(self.inputs, float) and self.inputs not in ("token", "block", None):
            raise ValueError(
                f'inputs is {self.inputs!r}: it must be "token", "block", a float or None'
            )

    @property
    def shape(self) -> tuple[int, int]:
        """See `Quantized.shape`."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def has_blocks(self) -> bool:
        """Whether blocks of 128 by 128 have the scales, not rows."""
        return self.scale.dim() == 2

    @property
    def device(self) -> torch.device:
        """See `Quantized.device`."""
        return self.codes.device

    @property
    def num_bytes(self) -> int:
        """See `Quantized.num_bytes`."""
        return self.codes.nbytes + self.scale.nbytes

    def row_scale(self) -> torch.Tensor:
        """Return the scales of each row: [N, 1], or [N, ceil(K / 128)] of blocks."""
        if not self.has_blocks:
            return self.scale[:, None]
        return self.scale.repeat_interleave(BLOCK, dim=0)[: self.shape[0]]

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """See `Quantized.dense`."""
        scale = by_columns(self.row_scale(), self.shape[1])
        return (self.codes.float() * scale).to(dtype)

    def rows(self, index: torch.Tensor) -> Self:
        """See `Quantized.rows`.

        Raises:
            ValueError: rows of one block of scales would be apart.
        """
        if not self.has_blocks:
            return replace(self, codes=self.codes[index], scale=self.scale[index])
        block = index // BLOCK
        starts = block[::BLOCK]
        if not torch.equal(block, starts.repeat_interleave(BLOCK)[: len(block)]):
            raise ValueError(
                "rows of one block are taken apart: 128 rows share their scales, so they must "
                "stay together; dequantize this matrix"
            )
        return replace(self, codes=self.codes[index], scale=self.scale[starts])

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """See `Quantized.stack`. Of several scales of x it takes the largest.

        Raises:
            ValueError: the parts disagree, or a block of scales would span two of them.
        """
        check_columns(parts)
        inputs = [part.inputs for part in parts]
        if all(isinstance(value, float) for value in inputs):
            chosen: str | float | None = max(value for value in inputs if isinstance(value, float))
        elif len(set(inputs)) == 1:
            chosen = inputs[0]
        else:
            raise ValueError(f"inputs is {inputs}: matrices in one stack must agree in it")
        common(parts, "has_blocks")
        partial = [part.shape[0] for part in parts[:-1] if part.shape[0] % BLOCK]
        if parts[0].has_blocks and partial:
            raise ValueError(
                f"a matrix has {partial[0]} rows: with scales of blocks all but the last of a "
                f"stack must have a multiple of {BLOCK}"
            )
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts])
        scale = torch.cat([part.scale for part in parts])
        return replace(parts[0], codes=codes.view(torch.float8_e4m3fn), scale=scale, inputs=chosen)

    def product(
        self, x: torch.Tensor, multiply: Multiply, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `Quantized.product`. With x quantized the product is in fp32, its scales last."""
        if self.inputs is None:
            return super().product(x, multiply, bias)
        codes, x_scale = quantize_tokens_fp8(x, self.inputs)
        if self.has_blocks or self.inputs == "block":
            values = codes.float() * by_columns(x_scale, x.shape[1])
            out = multiply(values, self.dense(torch.float32), None)
        else:
            out = multiply(codes.float(), self.codes.float(), None) * (x_scale * self.scale)
        return out if bias is None else out + bias.float()


@op()
def quantize_fp8(values: torch.Tensor) -> Fp8:
    """Quantize a weight of floats [N, K] to e4m3: row scales, tokens quantized by row.

    A scale is the row's largest |value| / 448, or 1 if that is 0.
    """
    scale = values.abs().amax(1).float() / E4M3_MAX
    scale = torch.where(scale == 0, 1.0, scale)
    return Fp8(to_e4m3(values.float() / scale[:, None]), scale, "token")
