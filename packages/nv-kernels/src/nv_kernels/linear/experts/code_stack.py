"""The matrices of all experts, as the kernels on a card read codes.

Each matrix is laid out as `triton.quantized_layout` has one; gate and up of an expert are two
matrices, one after the other. Codes of 8 bits with scales of blocks keep these, as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from nv_kernels.launch.sizes import cdiv
from nv_kernels.linear.experts.quantized import inputs_of
from nv_kernels.linear.quantized.blocks import Blocks
from nv_kernels.linear.quantized.fp8 import Fp8
from nv_kernels.linear.quantized.grouped import Grouped
from nv_kernels.linear.quantized.int8 import Int8
from nv_kernels.linear.triton.quantized_grouped import constants_of
from nv_kernels.linear.triton.quantized_layout import (
    CHUNK,
    ROWS,
    LaidOut,
    fits,
    lay_out_grouped,
    padded,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nv_kernels.linear.quantized.record import Quantized


@dataclass(frozen=True)
class CodeStack:
    """Codes of S matrices [N, K].

    Attributes:
        codes: [S, …]: of each matrix as in `LaidOut`; e4m3, int8 or uint8.
        scale: groups: [G, S * rows with padding]; 8 bits: [S, rows with padding], or of blocks of
            128 by 128, [S, ceil(N / 128), ceil(K / 128)].
        offset: of groups, as in `LaidOut`, or None.
        kind: "4" or "8", in groups; "e4m3" or "int8".
        num_rows: N.
        num_columns: K.
        inputs: how x is quantized, as `nk.Fp8` has it; None: not at all.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    kind: str
    num_rows: int
    num_columns: int
    inputs: str | float | None = None

    @property
    def num_matrices(self) -> int:
        """S."""
        return self.codes.shape[0]

    @property
    def is_grouped(self) -> bool:
        """Whether groups of columns have the scales."""
        return self.kind in ("4", "8")

    @property
    def padded_rows(self) -> int:
        """Rows of a matrix with padding."""
        return cdiv(self.num_rows, ROWS) * ROWS

    @property
    def num_row_blocks(self) -> int:
        """Blocks of 128 rows that have scales, per matrix; 0: each row has its own."""
        return 0 if self.is_grouped or self.scale.dim() == 2 else self.scale.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        tensors = (self.codes, self.scale, self.offset)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @cached_property
    def constants(self) -> tuple[int, int, str, str, int, str]:
        """A kernel's GROUP, GROUPS, KIND, OFFSET, BLOCKS and INPUTS; every launch reads them."""
        if self.is_grouped:
            group = self.num_columns // self.scale.shape[0]
            whole = LaidOut(
                self.codes, self.scale, self.offset, self.kind,
                self.num_matrices * self.padded_rows, self.num_columns, group,
            )  # fmt: skip
            return *constants_of(whole), 0, "none"
        inputs = "fixed" if isinstance(self.inputs, float) else self.inputs or "none"
        return 0, 0, self.kind, "none", self.num_row_blocks, inputs


def lay_out_stack(records: Sequence[Quantized]) -> CodeStack | None:
    """Lay records of one shape out; None: no kernel takes them together."""
    made = [each.grouped() if isinstance(each, Blocks) else each for each in records]
    if len({(type(each), inputs_of(each)) for each in made}) > 1:
        return None
    codes = [each for each in made if isinstance(each, Fp8 | Int8)]
    if codes:
        return _lay_out_codes(codes)
    return _lay_out_groups([each for each in made if isinstance(each, Grouped)])


def _lay_out_groups(records: Sequence[Grouped]) -> CodeStack | None:
    """Lay groups out, one matrix after the other; scales of several dtypes become fp32."""
    alike = {(each.bits, each.scale.shape[1], each.offset is None) for each in records}
    if len(alike) > 1 or any(each.order is not None for each in records):
        return None
    first = records[0]
    if not fits(first.shape[1], first.scale.shape[1]):
        return None
    laid = [lay_out_grouped(each) for each in records]
    offsets = [each.offset for each in laid if each.offset is not None]
    if len({each.dtype for each in offsets}) > 1:
        return None
    return CodeStack(
        torch.stack([each.codes for each in laid]),
        torch.cat([each.scale for each in laid], dim=1),
        torch.cat(offsets, dim=1) if offsets else None,
        str(first.bits),
        *first.shape,
    )


def _lay_out_codes(records: Sequence[Fp8 | Int8]) -> CodeStack | None:
    """Lay codes of 8 bits out, one matrix after the other."""
    if len({each.scale.shape for each in records}) > 1:
        return None
    first = records[0]
    rows, columns = cdiv(first.shape[0], ROWS) * ROWS, cdiv(first.shape[1], CHUNK) * CHUNK
    codes = torch.empty(len(records), rows, columns, dtype=torch.uint8, device=first.device)
    for target, record in zip(codes, records, strict=True):
        target.copy_(padded(record.codes.view(torch.uint8)))
    scales = torch.stack([each.scale for each in records])
    if scales.dim() == 2:
        scales = torch.nn.functional.pad(scales, (0, rows - first.shape[0]))
    is_int = isinstance(first, Int8)
    return CodeStack(
        codes.view(torch.int8 if is_int else torch.float8_e4m3fn), scales, None,
        "int8" if is_int else "e4m3", *first.shape, inputs_of(first),
    )  # fmt: skip
