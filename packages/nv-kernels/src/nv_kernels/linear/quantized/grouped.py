"""Codes of 4 or 8 bits with a scale per group of columns: AWQ, GPTQ, compressed-tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from nv_kernels.linear.quantized.record import Quantized, check_columns, common

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self


@dataclass(frozen=True)
class Grouped(Quantized):
    """Codes q of 4 or 8 bits; each row's group of K / G columns has a scale and perhaps an offset.

    The product is by the values, so x is not quantized.

    Attributes:
        codes: uint8. 8 bits: [N, K]. 4 bits: [N, K / 2]; byte j has column 2j in its low half and
            column 2j + 1 in its high half.
        scale: [N, G] fp16, bf16 or fp32.
        offset: None: a value is scale (q - 2^(bits - 1)). uint8 [N, G], zero points z:
            scale (q - z). Floats [N, G]: scale q + offset.
        bits: 4 or 8.
        order: int32 [K] or None: column j multiplies x[:, order[j]] (GPTQ's desc_act).
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    bits: int
    order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse tensors that do not fit together."""
        if self.bits not in (4, 8):
            raise ValueError(f"bits is {self.bits}: it must be 4 or 8")
        rows, columns = self.shape
        groups = self.scale.shape[-1]
        if self.scale.shape[0] != rows or not groups or columns % groups:
            raise ValueError(
                f"scale has shape {tuple(self.scale.shape)}: for a matrix {self.shape} it must be "
                f"({rows}, G), where G divides {columns}"
            )
        if self.offset is not None and self.offset.shape != self.scale.shape:
            raise ValueError(
                f"offset has shape {tuple(self.offset.shape)}: it must be {tuple(self.scale.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """See `Quantized.shape`."""
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    @property
    def group_size(self) -> int:
        """Columns per scale."""
        return self.shape[1] // self.scale.shape[1]

    @property
    def device(self) -> torch.device:
        """See `Quantized.device`."""
        return self.codes.device

    @property
    def num_bytes(self) -> int:
        """See `Quantized.num_bytes`."""
        tensors = (self.codes, self.scale, self.offset, self.order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """See `Quantized.dense`. Columns are in x's order."""
        rows, columns = self.shape
        q = self.codes
        if self.bits == 4:
            q = torch.stack((q & 15, q >> 4), dim=-1)
        q = q.view(rows, self.scale.shape[1], -1).float()
        scale = self.scale.float()[..., None]
        if self.offset is None:
            values = scale * (q - 2 ** (self.bits - 1))
        elif self.offset.is_floating_point():
            values = scale * q + self.offset.float()[..., None]
        else:
            values = scale * (q - self.offset[..., None])
        whole: torch.Tensor = values.view(rows, columns).to(dtype)
        if self.order is None:
            return whole
        return torch.empty_like(whole).index_copy_(1, self.order.long(), whole)

    def rows(self, index: torch.Tensor) -> Self:
        """See `Quantized.rows`."""
        offset = None if self.offset is None else self.offset[index]
        return replace(self, codes=self.codes[index], scale=self.scale[index], offset=offset)

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """See `Quantized.stack`."""
        common(parts, "bits")
        common(parts, "group_size")
        check_columns(parts)
        orders = [part.order for part in parts]
        first = orders[0]
        if any((o is None) != (first is None) for o in orders) or not all(
            first is None or o is None or torch.equal(first, o) for o in orders
        ):
            raise ValueError("order differs: matrices in one stack must agree in it")
        kinds = {None if part.offset is None else part.offset.dtype for part in parts}
        scales = {part.scale.dtype for part in parts}
        if len(kinds) > 1 or len(scales) > 1:
            raise ValueError(
                f"dtypes are {scales} of scale and {kinds} of offset: matrices in one stack must "
                "agree in them"
            )
        offsets = [part.offset for part in parts if part.offset is not None]
        return replace(
            parts[0],
            codes=torch.cat([part.codes for part in parts]),
            scale=torch.cat([part.scale for part in parts]),
            offset=torch.cat(offsets) if offsets else None,
        )
