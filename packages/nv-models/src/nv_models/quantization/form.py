"""A form: how a checkpoint's files keep one quantized matrix.

Owns what all forms share: the slice of each tensor that belongs to a rank's rows or columns. A form
names the tensors and makes a record of `nv_kernels` of them. Never reads a file.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import nv_kernels as nk
import torch

from nv_models.shard import Shard

FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
DUMMY_STD = 0.02
"""Of the values of a matrix of random codes, about."""


class Files(Protocol):
    """The tensors that a checkpoint has."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Their shapes by name."""
        ...

    def stored(self, name: str) -> torch.dtype | None:
        """A tensor's dtype in the files."""
        ...


class NoFiles:
    """An empty checkpoint: random weights need no files."""

    shapes: Mapping[str, tuple[int, ...]] = {}  # never changed

    def stored(self, name: str) -> torch.dtype | None:
        """Never called, as no name is in `shapes`."""
        raise KeyError(name)


@dataclass(frozen=True)
class Region:
    """The rows, or the columns, of one of the checkpoint's matrices that a rank holds.

    Attributes:
        module: that has the matrix, by its name in the checkpoint.
        shape: (N, K) of the whole matrix.
        rows: of N.
        columns: of K; all of them, or all rows are held.
    """

    module: str
    shape: tuple[int, int]
    rows: range
    columns: range

    @property
    def kept(self) -> tuple[int, int]:
        """The number of rows and of columns."""
        return len(self.rows), len(self.columns)

    @property
    def has_all_columns(self) -> bool:
        """Whether no column belongs to another rank."""
        return len(self.columns) == self.shape[1]

    def shard(self, target: torch.Tensor) -> Shard:
        """The place in the files of a matrix of floats."""
        by_rows = self.has_all_columns
        start = self.rows.start if by_rows else self.columns.start
        return Shard(target, f"{self.module}.weight", self.shape, 0 if by_rows else 1, start)


@dataclass(frozen=True)
class Axis:
    """A dimension of a stored tensor that follows the rows or the columns of its matrix.

    Attributes:
        along: which of both.
        per: how many of them an index stands for: values per word, or per scale.
        is_ragged: the last index may stand for fewer.
    """

    along: Literal["rows", "columns"]
    per: int = 1
    is_ragged: bool = False

    def total(self, region: Region) -> int:
        """The size of this dimension over all ranks."""
        total = region.shape[self.along == "columns"]
        self._check(region, total, total)
        return -(-total // self.per)

    def kept(self, region: Region) -> range:
        """This rank's indices."""
        kept: range = getattr(region, self.along)
        total = region.shape[self.along == "columns"]
        self._check(region, kept.start, total)
        self._check(region, kept.stop, total)
        return range(kept.start // self.per, -(-kept.stop // self.per))

    def _check(self, region: Region, bound: int, total: int) -> None:
        """Refuse a bound between two values of one word, or of one scale."""
        if bound % self.per == 0 or (bound == total and self.is_ragged):
            return
        if bound == total:
            raise ValueError(
                f"{region.module} has {total} {self.along}: they must be a multiple of {self.per}, "
                "the number that share a scale or a word; use another checkpoint"
            )
        raise ValueError(
            f"{region.module} would be cut at {bound} of its {total} {self.along}: a rank's share "
            f"must be a multiple of {self.per}, the number that share a scale or a word; use a "
            "smaller tensor_parallel_size"
        )


ROW, COLUMN = Axis("rows"), Axis("columns")


def on_host(device: torch.device) -> torch.device:
    """Where a tensor lies whose values are needed while loading: no kernel has to be waited for."""
    return device if device.type == "meta" else torch.device("cpu")


def stored(
    region: Region,
    suffix: str,
    axes: tuple[Axis | int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Shard:
    """Allocate a rank's part of a stored tensor.

    Args:
        region: of the matrix.
        suffix: of the tensor's name, after the module's.
        axes: its dimensions; a number is a size that no rank shares out.
        dtype: of the tensor.
        device: that holds it.

    Raises:
        ValueError: the rank's share would cut a word or a group.
    """
    whole = tuple(axis if isinstance(axis, int) else axis.total(region) for axis in axes)
    kept = [range(axis) if isinstance(axis, int) else axis.kept(region) for axis in axes]
    cut = [dim for dim, size in enumerate(whole) if len(kept[dim]) != size]
    dim = cut[0] if cut else 0
    target = torch.empty([len(each) for each in kept], dtype=dtype, device=device)
    return Shard(target, f"{region.module}.{suffix}", whole, dim, kept[dim].start if kept else 0)


class Form(ABC):
    """How the files keep a matrix."""

    @property
    def is_ordered(self) -> bool:
        """Whether columns are in an order of their own, by their groups."""
        return False

    def stacks_with(self, other: "Form") -> bool:
        """Whether records of both can be one record."""
        return self == other

    @abstractmethod
    def tensors(self, region: Region, device: torch.device) -> dict[str, Shard]:
        """Allocate the tensors, by the names that `record` knows.

        Raises:
            ValueError: the rank's share of the matrix would cut a word or a group.
        """

    @abstractmethod
    def record(self, values: Mapping[str, torch.Tensor], region: Region) -> nk.Quantized:
        """Make the record of the loaded tensors.

        Args:
            values: by the names of `tensors`.
            region: for which they were allocated.

        Raises:
            ValueError: the values contradict each other.
        """

    @abstractmethod
    def num_bytes(self, region: Region) -> int:
        """Bytes of the record of a region."""

    def card_bytes(self, region: Region) -> int:
        """Bytes of the record of a region as a card lays it out."""
        return self.num_bytes(region)

    def beside(self, others: Sequence["Form | None"]) -> "Form":
        """The form of this matrix in a stack with others."""
        del others  # only blocks change beside those of another kind
        return self

    @abstractmethod
    def fill_dummy(
        self, values: Mapping[str, torch.Tensor], region: Region, generator: torch.Generator
    ) -> None:
        """Fill the tensors at random, so that values deviate by about DUMMY_STD."""


def random_words(target: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a tensor of integers with random bits."""
    info = torch.iinfo(target.dtype)
    target.random_(info.min, info.max, generator=generator)


def float_dtype(files: Files, name: str, default: torch.dtype) -> torch.dtype:
    """The dtype of a stored scale; the default without the file."""
    found = files.stored(name) if name in files.shapes else default
    return found if found in {torch.float16, torch.bfloat16} else torch.float32
