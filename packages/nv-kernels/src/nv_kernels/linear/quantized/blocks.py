"""A matrix in the blocks of a GGUF file, which stay where they lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from nv_kernels.linear.quantized.block_kinds import BLOCK_KINDS
from nv_kernels.linear.quantized.grouped import Grouped
from nv_kernels.linear.quantized.record import Quantized, check_columns, common

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from nv_kernels.linear.quantized.block_kinds import BlockKind, Unpacked


@dataclass(frozen=True)
class Blocks(Quantized):
    """Rows of GGUF blocks of one kind, used without a copy.

    Attributes:
        parts: uint8 [n, bytes per row] each: matrices one below the other, together R rows. A
            row's bytes must be adjacent; rows may be apart (some columns of a wider matrix).
        kind: a name of BLOCK_KINDS.
        index: int64 [N]: row i is row index[i] of the parts; None: row i.
    """

    parts: tuple[torch.Tensor, ...]
    kind: str
    index: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse what is not rows of whole blocks."""
        if self.kind not in BLOCK_KINDS:
            raise ValueError(f"kind is {self.kind!r}: it must be one of {', '.join(BLOCK_KINDS)}")
        size = self.layout.num_bytes
        for part in self.parts:
            if part.dtype != torch.uint8 or part.dim() != 2 or part.shape[1] % size:
                raise ValueError(
                    f"rows are {part.dtype} {tuple(part.shape)}: {self.kind} needs uint8 "
                    f"[n, bytes], where bytes is a multiple of {size}"
                )

    @property
    def layout(self) -> BlockKind:
        """The sizes of a block."""
        return BLOCK_KINDS[self.kind]

    @property
    def shape(self) -> tuple[int, int]:
        """See `Quantized.shape`."""
        num_rows = sum(len(part) for part in self.parts)
        blocks = self.parts[0].shape[1] // self.layout.num_bytes
        num_rows = num_rows if self.index is None else len(self.index)
        return num_rows, blocks * self.layout.num_values

    @property
    def device(self) -> torch.device:
        """See `Quantized.device`."""
        return self.parts[0].device

    @property
    def num_bytes(self) -> int:
        """See `Quantized.num_bytes`."""
        index = 0 if self.index is None else self.index.nbytes
        return sum(part.nbytes for part in self.parts) + index

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """See `Quantized.dense`. Its bits are those of `dequantize` of the gguf library."""
        q, scale, offset = self._unpacked()
        q = q.view(len(scale), -1, self.layout.group_size)
        if offset is None:
            values = scale[..., None] * (q.float() - (self.layout.zero or 0))
        else:
            values = scale[..., None] * q + offset[..., None]
        return values.view(self.shape).to(dtype)

    def grouped(self) -> Grouped:
        """Convert to `Grouped`, for a device without a product of blocks.

        A scale or an offset that is a product of two numbers of the file is rounded to fp16, a
        relative error of 2^-11; all of a matrix stay fp32 if one is too large for fp16.
        """
        rows, columns = self.shape
        kind = self.layout
        q, scale, offset = self._unpacked()
        if kind.zero is not None:  # Grouped subtracts 8 or 128
            q = q + (2 ** (kind.bits - 1) - kind.zero)
        q = q.view(rows, columns)
        if kind.bits == 4:
            q = q[:, ::2] | q[:, 1::2] << 4
        scale = scale.view(rows, columns // kind.group_size)
        offset = None if offset is None else offset.view_as(scale)
        narrow = scale.half(), None if offset is None else offset.half()
        if all(tensor is None or bool(tensor.isfinite().all()) for tensor in narrow):
            scale, offset = narrow
        return Grouped(q, scale, offset, kind.bits)

    def rows(self, index: torch.Tensor) -> Self:
        """See `Quantized.rows`. The blocks are shared, not copied."""
        return replace(self, index=index if self.index is None else self.index[index])

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """See `Quantized.stack`. The blocks are shared, not copied."""
        common(parts, "kind")
        check_columns(parts)
        tensors = tuple(tensor for part in parts for tensor in part.parts)
        if all(part.index is None for part in parts):
            return replace(parts[0], parts=tensors)
        indices, above = [], 0
        for part in parts:
            num_rows = sum(len(tensor) for tensor in part.parts)
            index = torch.arange(num_rows, device=part.device) if part.index is None else part.index
            indices.append(index + above)
            above += num_rows
        return replace(parts[0], parts=tensors, index=torch.cat(indices))

    def _unpacked(self) -> Unpacked:
        whole = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        whole = whole if self.index is None else whole[self.index]
        return self.layout.unpack(whole.reshape(-1, self.layout.num_bytes))
