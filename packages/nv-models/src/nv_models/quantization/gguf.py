"""GGUF: blocks that stay quantized, on a CPU where they lie in the mapped file.

Owns the choice of the tensors that stay quantized. The layout of each kind of block is
`nv_kernels`'. Never reads a file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import nv_kernels as nk
import torch
from nv_kernels.linear.quantized.block_kinds import BLOCK_KINDS

from nv_models.quantization.form import Axis, Form, Region
from nv_models.quantization.grouped import grouped_bytes
from nv_models.quantization.scheme import Dequantized, Scheme
from nv_models.shard import Shard

MXFP4 = "MXFP4"
"""The type of GPT-OSS's experts, which are always dequantized, and without a warning."""
MIXED_GROUP = min(kind.group_size for kind in BLOCK_KINDS.values())
"""Columns per scale where blocks of several kinds are one record."""


@runtime_checkable
class BlockFiles(Protocol):
    """A checkpoint of a mapped file with tensors in blocks."""

    def block_kind(self, name: str) -> str | None:
        """The name of a tensor's type; None: it is in floats."""
        ...

    def blocks(self, name: str, rows: range, columns: range) -> torch.Tensor:
        """Rows of blocks where they lie, uint8 [n, bytes]."""
        ...

    def row_index(self, name: str, rows: range) -> torch.Tensor | None:
        """Which of these rows is the checkpoint's i-th one; None: they are in order."""
        ...


def block_files(checkpoint: object) -> BlockFiles | None:
    """The checkpoint, if it is a GGUF file."""
    return checkpoint if isinstance(checkpoint, BlockFiles) else None


@dataclass(frozen=True)
class GGUFForm(Form):
    """Rows of blocks.

    Attributes:
        kind: a name of BLOCK_KINDS.
        files: that have them.
        is_on_card: the record becomes groups of codes there.
        is_mixed: it is one record with blocks of another kind.
    """

    kind: str
    files: BlockFiles
    is_on_card: bool = False
    is_mixed: bool = False

    def stacks_with(self, other: Form) -> bool:
        """Blocks of several kinds are one record."""
        return isinstance(other, GGUFForm)

    def tensors(self, region: Region, device: torch.device) -> dict[str, Shard]:
        """See `Form.tensors`. On a CPU the rows are not copied."""
        name = f"{region.module}.weight"
        if device.type == "meta":
            rows = torch.empty(0, dtype=torch.uint8, device=device)
        else:
            rows = self.files.blocks(name, region.rows, region.columns).to(device)
        return {"rows": Shard(rows, name, region.shape, is_filled=True)}

    def record(self, values: Mapping[str, torch.Tensor], region: Region) -> nk.Quantized:
        """See `Form.record`."""
        rows = values["rows"]
        index = self.files.row_index(f"{region.module}.weight", region.rows)
        return nk.Blocks((rows,), self.kind, None if index is None else index.to(rows.device))

    def num_bytes(self, region: Region) -> int:
        """See `Form.num_bytes`."""
        rows, columns = region.kept
        block = BLOCK_KINDS[self.kind]
        if self.is_on_card:
            if self.is_mixed:  # codes of 8 bits, scales and offsets in fp32
                return grouped_bytes(region, 8, MIXED_GROUP, torch.float32, torch.float32)
            offset = torch.float16 if block.zero is None else None
            return grouped_bytes(region, block.bits, block.group_size, torch.float16, offset)
        index = self.files.row_index(f"{region.module}.weight", region.rows)
        return rows * columns // block.num_values * block.num_bytes + 8 * rows * (index is not None)

    def beside(self, others: Sequence[Form | None]) -> Form:
        """See `Form.beside`."""
        kinds = {each.kind for each in others if isinstance(each, GGUFForm)}
        return replace(self, is_mixed=len(kinds) > 1)

    def fill_dummy(
        self, values: Mapping[str, torch.Tensor], region: Region, generator: torch.Generator
    ) -> None:
        """Never called: random weights have no file, and so no blocks."""
        raise AssertionError(region.module)


class GGUFScheme(Scheme):
    """The tensors of a GGUF file."""

    name = "gguf"

    def __init__(self, files: BlockFiles, dtype: torch.dtype, *, is_on_card: bool = False) -> None:
        """Keep what has a kind of BLOCK_KINDS.

        Args:
            files: that have the tensors.
            dtype: of those that are dequantized.
            is_on_card: the model computes on a card.
        """
        super().__init__()
        self._files, self._dtype, self._is_on_card = files, dtype, is_on_card

    def form(self, region: Region) -> Form | None:
        """See `Scheme.form`. A tensor that cannot stay quantized is noted for the warning."""
        kind = self._files.block_kind(f"{region.module}.weight")
        if kind in (None, MXFP4) or not len(region.rows):
            return None
        reason = reason_to_dequantize(kind, region)
        if reason is None:
            return GGUFForm(kind, self._files, self._is_on_card)
        rows, columns = region.kept
        size = rows * columns * self._dtype.itemsize
        self.note(Dequantized((region.module,), size, reason))
        return None

    def embedding_form(self, region: Region) -> Form | None:
        """See `Scheme.embedding_form`. On a card the embedding is in floats."""
        return None if self._is_on_card else self.form(region)


def reason_to_dequantize(kind: str, region: Region) -> str | None:
    """Why a tensor cannot stay quantized."""
    if kind not in BLOCK_KINDS:
        return f"{kind} has no product yet; {', '.join(BLOCK_KINDS)} have one"
    try:
        Axis("columns", BLOCK_KINDS[kind].num_values).kept(region)
    except ValueError as error:
        return str(error)
    return None
