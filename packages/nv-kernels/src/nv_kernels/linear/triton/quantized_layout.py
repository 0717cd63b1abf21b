"""Weight-only codes as the kernels on a card read them.

Rows are padded to 64 and columns to 128, with code 0. Codes of 4 bits lie in units of 16 rows by
128 columns, 1 KB each: byte j of a row has column j in its low half and column 64 + j in its high
half, and the bytes are in the order in which a warp's threads hold the tensor cores' left operand.
So a thread loads 16 adjacent bytes, and nothing is exchanged between threads. Codes of 8 bits stay
in rows. Scales lie with the rows side by side, [G, N].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from nv_kernels.linear.quantized.fp8 import Fp8
    from nv_kernels.linear.quantized.grouped import Grouped

CHUNK = 128  # columns that one step of a kernel multiplies
ROWS = 64  # rows that one tile of a kernel has at least
UNIT_ROWS = 16
LOW_HALVES = 0x0F0F0F0F  # of the bytes of a word
SMALLEST_GROUP = 16
# A word has codes of two columns (2j, 2j + 1) and two rows (r, r + 8), of each half of a chunk. $4
# is a word; $0 to $3 are the rows r and r + 8 of its first half, then of its second, each as
# 128 + code in bf16, which has the code in its last bits.
UNPACK_WORD = """{
    .reg .b32 first, second;
    prmt.b32 first, $4, 0, 0x4140;
    prmt.b32 second, $4, 0, 0x4342;
    lop3.b32 $0, first, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $1, second, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 first, first, 4;
    shr.u32 second, second, 4;
    lop3.b32 $2, first, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $3, second, 0x000F000F, 0x43004300, 0xEA;
"""
UNPACK_LESS_ZERO = (
    UNPACK_WORD
    + """
    sub.rn.bf16x2 $0, $0, $5;
    sub.rn.bf16x2 $1, $1, $6;
    sub.rn.bf16x2 $2, $2, $5;
    sub.rn.bf16x2 $3, $3, $6;
"""
)
"""The same less $5, 128 + zero of row r, and $6, of row r + 8."""


@dataclass(frozen=True)
class LaidOut:
    """Codes of a weight [N, K] for weight-only products.

    Attributes:
        codes: uint8; 4 bits: [units of rows, chunks, 1024]; 8 bits and e4m3: [rows, columns].
        scale: [G, rows].
        offset: [G, rows] or None: with codes of 4 or 8 bits it is 2^(bits - 1) everywhere. In
            zeros' dtype (bf16 128 + zero for 4 bits, int16 for 8 bits) or float.
        kind: "4", "8" or "e4m3".
        num_rows: N.
        num_columns: K.
        group: columns per scale; K where there is one group.
        order: int32 [K] or None: column j multiplies x[:, order[j]].
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    kind: str
    num_rows: int
    num_columns: int
    group: int
    order: torch.Tensor | None = None

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns with padding."""
        return -(-self.num_rows // ROWS) * ROWS, -(-self.num_columns // CHUNK) * CHUNK

    @property
    def has_zeros(self) -> bool:
        """Whether `offset` has zero points, which are subtracted from the codes."""
        return self.offset is not None and self.offset.dtype == torch.int16

    def is_read_in_units(self, x: torch.Tensor) -> bool:
        """Whether kernels that read codes of 4 bits by units multiply tokens x by them.

        They need bf16 at aligned addresses, scales of whole chunks, and no float offsets.
        """
        return (
            self.kind == "4"
            and (self.offset is None or self.has_zeros)
            and self.group % CHUNK == 0
            and x.shape[0] > 0
            and x.dtype == torch.bfloat16
            and x.is_contiguous()
            and x.data_ptr() % 16 == 0
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        tensors = (self.codes, self.scale, self.offset, self.order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def fits(columns: int, groups: int) -> bool:
    """Whether the kernels take groups of this size: a power of 2 from 16, or multiples of 128."""
    group = columns // groups
    if groups == 1 or group % CHUNK == 0:
        return True
    return group >= SMALLEST_GROUP and group & (group - 1) == 0


def lay_out_grouped(record: Grouped) -> LaidOut:
    """Lay out a record's codes, scales and offsets; `fits` must hold."""
    rows, columns = record.shape
    if record.bits == 4:
        codes = interleave(padded(record.codes, CHUNK // 2))
    else:
        codes = padded(record.codes)
    offset = record.offset
    if offset is not None and not offset.is_floating_point():
        # 128 + zero in bf16, as 16 bits: what the kernel subtracts from 128 + code.
        offset = (offset + 128.0).bfloat16().view(torch.int16) if record.bits == 4 else offset
        offset = offset.to(torch.int16)
    groups = record.scale.shape[1]
    return LaidOut(
        codes, _beside(record.scale), None if offset is None else _beside(offset),
        str(record.bits), rows, columns, columns // groups, record.order,
    )  # fmt: skip


def lay_out_fp8(record: Fp8) -> LaidOut:
    """Lay out e4m3 codes for products that do not quantize x."""
    rows, columns = record.shape
    codes = padded(record.codes.view(torch.uint8))
    group = CHUNK if record.has_blocks else columns
    return LaidOut(codes, _beside(record.row_scale()), None, "e4m3", rows, columns, group)


def interleave(packed: torch.Tensor) -> torch.Tensor:
    """Order codes of 4 bits [N, K/2], two per byte, as the kernels read them: [N/16, K/128, 1024].

    A thread of a warp holds rows r and r + 8, r its number / 4, and of each 16 columns 2q, 2q + 1,
    2q + 8 and 2q + 9, q its number % 4. All but the last copy work on words of 8 codes, because a
    model has billions of codes.
    """
    rows, chunks = packed.shape[0], packed.shape[1] * 2 // CHUNK
    words = packed.view(torch.int32).view(rows, chunks, 2, -1)
    first, second = words[:, :, 0], words[:, :, 1]  # halves of a chunk
    even = (first & LOW_HALVES) | (second & LOW_HALVES) << 4
    odd = (first >> 4 & LOW_HALVES) | (second & ~LOW_HALVES)
    both = torch.stack((even, odd)).view(torch.uint8)
    # column, unit, row 8, row, chunk, half of the bytes, column 16, column 8, pair
    bits = both.view(2, rows // UNIT_ROWS, 2, 8, chunks, 2, 2, 2, 4)
    return bits.permute(1, 4, 5, 3, 8, 6, 7, 2, 0).reshape(rows // UNIT_ROWS, chunks, 1024)


def padded(codes: torch.Tensor, size: int = CHUNK) -> torch.Tensor:
    """Pad codes [N, bytes] with 0 to whole tiles of rows and `size` bytes."""
    if codes.shape[0] % ROWS == 0 and codes.shape[1] % size == 0:
        return codes.contiguous()
    return functional.pad(codes, (0, -codes.shape[1] % size, 0, -codes.shape[0] % ROWS))


def _beside(values: torch.Tensor) -> torch.Tensor:
    """Transpose [N, G] to [G, N], the rows padded."""
    padded = functional.pad(values.t(), (0, -values.shape[0] % ROWS))
    return padded.contiguous()
