"""The matrix of a layer while it is loaded: its quantized parts, and what becomes of them.

Owns the stacking of parts, and the fallback for those that disagree. Never reads a file.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import nv_kernels as nk
import torch
from nv_kernels.linear.quantized.weight import BatchInvariantQuantized

from nv_models.quantization.form import DUMMY_STD, Form, Region
from nv_models.quantization.scheme import Dequantized, Scheme
from nv_models.shard import Shard


@dataclass(frozen=True)
class Part:
    """One of the checkpoint's matrices, allocated.

    Attributes:
        region: of it.
        order: which of its loaded rows is its i-th row, or None: they are in order.
        form: how the files keep it; None: as floats.
        shards: of its tensors, by the names that the form knows.
    """

    region: Region
    order: torch.Tensor | None
    form: Form | None
    shards: dict[str, Shard]

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """The tensors by the form's names."""
        return {name: shard.target for name, shard in self.shards.items()}


class LoadedMatrix:
    """The parts of a layer's matrix, one below the other, of which at least one is quantized."""

    def __init__(self, parts: Sequence[Part], scheme: Scheme, dtype: torch.dtype) -> None:
        self.parts = list(parts)
        self.scheme = scheme
        self.dtype = dtype

    def shards(self) -> Iterator[Shard]:
        """Where the values of all tensors come from."""
        for part in self.parts:
            yield from part.shards.values()

    def fill_dummy(self, generator: torch.Generator) -> None:
        """Fill the tensors at random; floats are normal."""
        for part in self.parts:
            if part.form is None:
                part.shards["weight"].target.normal_(0.0, DUMMY_STD, generator=generator)
            else:
                part.form.fill_dummy(part.values, part.region, generator)

    @property
    def num_bytes(self) -> int:
        """Bytes of the finished weight."""
        return self._bytes([part.form.num_bytes(part.region) for part in self.parts if part.form])

    @property
    def card_bytes(self) -> int:
        """Bytes of the finished weight as a card lays it out."""
        return self._bytes([part.form.card_bytes(part.region) for part in self.parts if part.form])

    def _bytes(self, sizes: Sequence[int]) -> int:
        """The sum of the records' sizes, or bytes as floats where parts disagree."""
        first = self.parts[0].form
        if first and all(part.form and first.stacks_with(part.form) for part in self.parts):
            return sum(sizes)
        values = sum(math.prod(part.region.kept) for part in self.parts)
        return values * self.dtype.itemsize

    def weight(
        self,
        of_record: Callable[[nk.Quantized], nk.Weight],
        of_floats: Callable[[torch.Tensor], nk.Weight],
    ) -> nk.Weight:
        """Make the weight of the loaded tensors, which are released.

        Args:
            of_record: makes it of a record.
            of_floats: makes it of floats [N, K], where the parts disagree.
        """
        modules = tuple(part.region.module for part in self.parts)
        records: list[nk.Quantized | torch.Tensor] = []
        while self.parts:
            records.append(loaded(self.parts.pop(0), self.dtype))
        try:
            record = stacked(records)
        except ValueError as error:
            values = torch.cat([floats(each, self.dtype) for each in records])
            self.scheme.note(Dequantized(modules, values.nbytes, str(error)))
            return of_floats(values)
        records.clear()
        made = of_record(record)
        if record.device.type == "cpu" or not is_definition(made, record):
            return made
        values = record.dense(self.dtype)
        reason = f"no kernel takes {type(record).__name__} of {list(record.shape)}"
        self.scheme.note(Dequantized(modules, values.nbytes, reason))
        return of_floats(values)

    def dequantized(self) -> torch.Tensor:
        """The values [N, K] of a matrix of one part, which is released."""
        return floats(loaded(self.parts.pop(), self.dtype), self.dtype)

    def blocks(self) -> nk.Blocks:
        """The record of a matrix of one part in blocks, which is released."""
        record = loaded(self.parts.pop(), self.dtype)
        assert isinstance(record, nk.Blocks), "only blocks are looked up"
        return record


Ordered = tuple[Region, torch.Tensor | None]
"""A region, and which of its loaded rows is its i-th row; None: they are in order."""


def allocated(
    regions: Sequence[Ordered], scheme: Scheme | None, dtype: torch.dtype, device: torch.device
) -> LoadedMatrix | None:
    """Allocate a matrix of several parts; None: all of them are floats."""
    forms = [scheme.form(region) if scheme else None for region, _ in regions]
    if scheme is None or not any(forms):
        return None
    forms = [form and form.beside(forms) for form in forms]
    return of_forms(regions, forms, scheme, dtype, device)


def of_forms(
    regions: Sequence[Ordered],
    forms: Sequence[Form | None],
    scheme: Scheme,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedMatrix:
    """Allocate a matrix of parts whose forms are known."""
    parts = []
    for (region, order), form in zip(regions, forms, strict=True):
        if form is None:
            values = torch.empty(region.kept, dtype=dtype, device=device)
            shards = {"weight": region.shard(values)}
        else:
            shards = form.tensors(region, device)
        parts.append(Part(region, order, form, shards))
    return LoadedMatrix(parts, scheme, dtype)


def is_definition(made: nk.Weight, record: nk.Quantized) -> bool:
    """Whether a card would compute a product by its definition, the floats at each call."""
    return made is record or isinstance(made, BatchInvariantQuantized)


def loaded(part: Part, dtype: torch.dtype) -> nk.Quantized | torch.Tensor:
    """The part's record, or floats, its rows in order."""
    order = None if part.order is None else part.order
    if part.form is None:
        values = part.values["weight"]
        return values if order is None else values[order.to(values.device)]
    record = part.form.record(part.values, part.region)
    if order is None:
        return record
    order = order.to(record.device)
    try:
        return record.rows(order)
    except ValueError:  # rows that share a scale would be apart
        return record.dense(dtype)[order]


def stacked(records: Sequence[nk.Quantized | torch.Tensor]) -> nk.Quantized:
    """One record of all.

    Raises:
        ValueError: they disagree.
    """
    quantized = [each for each in records if isinstance(each, nk.Quantized)]
    kinds = sorted({type(each).__name__ for each in records})
    if len(quantized) < len(records) or len(kinds) > 1:
        raise ValueError(f"matrices in one stack are of several kinds, {', '.join(kinds)}")
    return quantized[0] if len(quantized) == 1 else type(quantized[0]).stack(quantized)


def floats(each: nk.Quantized | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values [N, K] of a record or of floats."""
    return each.dense(dtype) if isinstance(each, nk.Quantized) else each
