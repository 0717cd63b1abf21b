"""A matrix in the blocks of a GGUF file, which stay where they lie.

Owns the conversion to `Grouped`. Never copies the blocks of a mapped file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from nv_kernels.linear.quantized.block_kinds import BLOCK_KINDS
from nv_kernels.linear.quantized.grouped import Grouped
from nv_kernels.linear.quantized.record import Quantized, check_columns

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from nv_kernels.linear.quantized.block_kinds import BlockKind

SMALLEST_GROUP = min(kind.group_size for kind in BLOCK_KINDS.values())


@dataclass(frozen=True)
class Blocks(Quantized):
    """Rows of GGUF blocks, used without a copy.

    Attributes:
        parts: uint8 [n, bytes per row] each: matrices one below the other, together R rows. A
            row's bytes must be adjacent; rows may be apart (some columns of a wider matrix).
        kind: a name of BLOCK_KINDS, of all parts or one for each: files mix kinds.
        index: int64 [N]: row i is row index[i] of the parts; None: row i.
    """

    parts: tuple[torch.Tensor, ...]
    kind: str | tuple[str, ...]
    index: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse what is not rows of whole blocks."""
        if len(self.kinds) != len(self.parts):
            raise ValueError(f"kind is {self.kind} for {len(self.parts)} parts: each has one")
        for part, kind in zip(self.parts, self.kinds, strict=True):
            if kind not in BLOCK_KINDS:
                raise ValueError(f"kind is {kind!r}: it must be one of {', '.join(BLOCK_KINDS)}")
            size = BLOCK_KINDS[kind].num_bytes
            if part.dtype != torch.uint8 or part.dim() != 2 or part.shape[1] % size:
                raise ValueError(
                    f"rows are {part.dtype} {tuple(part.shape)}: {kind} needs uint8 [n, bytes], "
                    f"where bytes is a multiple of {size}"
                )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each part."""
        return (self.kind,) * len(self.parts) if isinstance(self.kind, str) else self.kind

    @property
    def shape(self) -> tuple[int, int]:
        """See `Quantized.shape`."""
        num_rows = sum(len(part) for part in self.parts)
        layout = BLOCK_KINDS[self.kinds[0]]
        columns = self.parts[0].shape[1] // layout.num_bytes * layout.num_values
        return num_rows if self.index is None else len(self.index), columns

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
        parts = [
            _dense(BLOCK_KINDS[kind], part).to(dtype)
            for part, kind in zip(self.parts, self.kinds, strict=True)
        ]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole if self.index is None else whole[self.index]

    def grouped(self) -> Grouped:
        """Convert to `Grouped`, for a device without a product of blocks.

        A scale or an offset that is a product of two numbers of the file is rounded to fp16, a
        relative error of 2^-11; all of a part stay fp32 if one is too large for fp16. Parts of
        different kinds become codes of 8 bits.
        """
        parts = [
            _grouped(BLOCK_KINDS[kind], part)
            for part, kind in zip(self.parts, self.kinds, strict=True)
        ]
        if len(set(self.kinds)) > 1 or len({part.scale.dtype for part in parts}) > 1:
            parts = [_widened(part) for part in parts]
        whole = parts[0] if len(parts) == 1 else Grouped.stack(parts)
        return whole if self.index is None else whole.rows(self.index)

    def rows(self, index: torch.Tensor) -> Self:
        """See `Quantized.rows`. The blocks are shared, not copied."""
        return replace(self, index=index if self.index is None else self.index[index])

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """See `Quantized.stack`. The blocks are shared, not copied; kinds may differ."""
        check_columns(parts)
        tensors = tuple(tensor for part in parts for tensor in part.parts)
        kinds = tuple(kind for part in parts for kind in part.kinds)
        whole = replace(parts[0], parts=tensors, kind=kinds, index=None)
        if all(part.index is None for part in parts):
            return whole
        indices, above = [], 0
        for part in parts:
            num_rows = sum(len(tensor) for tensor in part.parts)
            index = torch.arange(num_rows, device=part.device) if part.index is None else part.index
            indices.append(index + above)
            above += num_rows
        return replace(whole, index=torch.cat(indices))


def _dense(kind: BlockKind, rows: torch.Tensor) -> torch.Tensor:
    """Compute the fp32 values of rows of blocks."""
    q, scale, offset = kind.unpack(rows.reshape(-1, kind.num_bytes))
    q = q.view(len(scale), -1, kind.group_size)
    if offset is None:
        values = scale[..., None] * (q.float() - (kind.zero or 0))
    else:
        values = scale[..., None] * q + offset[..., None]
    return values.view(len(rows), -1)


def _grouped(kind: BlockKind, rows: torch.Tensor) -> Grouped:
    q, scale, offset = kind.unpack(rows.reshape(-1, kind.num_bytes))
    if kind.zero is not None:  # Grouped subtracts 8 or 128
        q = q + (2 ** (kind.bits - 1) - kind.zero)
    q = q.view(len(rows), -1)
    columns = q.shape[1]
    if kind.bits == 4:
        q = q[:, ::2] | q[:, 1::2] << 4
    scale = scale.view(len(rows), columns // kind.group_size)
    offset = None if offset is None else offset.view_as(scale)
    narrow = scale.half(), None if offset is None else offset.half()
    if all(tensor is None or bool(tensor.isfinite().all()) for tensor in narrow):
        scale, offset = narrow
    return Grouped(q, scale, offset, kind.bits)


def _widened(grouped: Grouped) -> Grouped:
    """The same values as 8 bits in the smallest groups that a kind has, with fp32 offsets."""
    codes, scale, offset = grouped.codes, grouped.scale.float(), grouped.offset
    offset = -scale * 2 ** (grouped.bits - 1) if offset is None else offset.float()
    if grouped.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    repeats = grouped.group_size // SMALLEST_GROUP
    scale, offset = (each.repeat_interleave(repeats, dim=1) for each in (scale, offset))
    return Grouped(codes, scale, offset, 8)
