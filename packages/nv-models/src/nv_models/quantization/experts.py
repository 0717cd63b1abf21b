"""The matrices of a layer's experts while they are loaded, all of them quantized.

Owns the choice whether they stay so, and what becomes of them. Never reads a file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import nv_kernels as nk
import torch

from nv_models.quantization.form import Form, Region
from nv_models.quantization.matrix import Part
from nv_models.quantization.scheme import Dequantized, Scheme
from nv_models.shard import Shard

Stacks = Mapping[str, Sequence[Region]]
"""The experts' regions, by the fields of `nk.QuantizedExperts`."""
SHARED_INPUTS = (("gates", "ups"), ("downs",))
"""Stacks that multiply the same tokens."""


class LoadedExperts:
    """The matrices of a layer's experts, each of which has a form."""

    def __init__(
        self,
        stacks: Stacks,
        forms: Mapping[str, Sequence[Form]],
        scheme: Scheme,
        device: torch.device,
    ) -> None:
        self.scheme = scheme
        self.parts = {
            name: [
                Part(region, None, form, form.tensors(region, device))
                for region, form in zip(stacks[name], forms[name], strict=True)
            ]
            for name in stacks
        }

    def _all(self) -> Iterator[Part]:
        for parts in self.parts.values():
            yield from parts

    def shards(self) -> Iterator[Shard]:
        """Where the values of all tensors come from."""
        for part in self._all():
            yield from part.shards.values()

    def fill_dummy(self, generator: torch.Generator) -> None:
        """Fill the tensors at random."""
        for part in self._all():
            assert part.form is not None
            part.form.fill_dummy(part.values, part.region, generator)

    @property
    def num_values(self) -> int:
        """Values of all matrices."""
        return sum(len(each.region.rows) * len(each.region.columns) for each in self._all())

    @property
    def num_bytes(self) -> int:
        """Bytes of the finished records."""
        return sum(each.form.num_bytes(each.region) for each in self._all() if each.form)

    @property
    def card_bytes(self) -> int:
        """Bytes of the finished records as a card lays them out."""
        return sum(each.form.card_bytes(each.region) for each in self._all() if each.form)

    def experts(
        self,
        arithmetic: nk.Arithmetic,
        dtype: torch.dtype,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        gate: nk.Gate,
    ) -> nk.Experts:
        """Make the experts of the loaded tensors, which are released.

        Args:
            arithmetic: that lays them out.
            dtype: of the floats, where a card has no kernel for the records.
            gate_up_bias: [E, 2F] or None.
            down_bias: [E, K] or None.
            gate: how the products of gate and up become one.
        """
        names = [each.region.module for each in self._all()]
        stacks = {name: _records(parts) for name, parts in self.parts.items()}
        for shared in SHARED_INPUTS:
            records = _with_one_scale([each for name in shared for each in stacks[name]])
            count = len(stacks[shared[0]])
            stacks |= {
                name: records[index * count : (index + 1) * count]
                for index, name in enumerate(shared)
            }
        plain = nk.QuantizedExperts(
            **{name: tuple(records) for name, records in stacks.items()},
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            gate=gate,
        )
        stacks.clear()
        made = arithmetic.quantized_experts(plain)
        if made is not plain or plain.device.type == "cpu":
            return made
        gates, ups, downs = (_floats(records, dtype) for records in plain.records.values())
        gate_up = torch.cat((gates, ups), dim=1)
        kind = type(plain.downs[0]).__name__
        reason = f"no kernel takes experts of these {kind}"
        self.scheme.note(Dequantized((*names,), gate_up.nbytes + downs.nbytes, reason))
        return arithmetic.experts(nk.DenseExperts(gate_up, downs, gate_up_bias, down_bias, gate))


def allocated_experts(stacks: Stacks, scheme: Scheme, device: torch.device) -> LoadedExperts | None:
    """Allocate the experts of a layer; None: they do not all stay quantized, in one kind of form.

    They do not where some are floats, or have an order of columns: each expert has an order of its
    own, so that a token's values would be gathered once per expert.
    """
    found: dict[str, list[Form]] = {}
    for name, regions in stacks.items():
        forms = [scheme.form(region) for region in regions]
        kept = [form for form in forms if form is not None and not form.is_ordered]
        if len(kept) < len(regions) or len({type(form) for form in kept}) > 1:
            return None
        found[name] = kept
    return LoadedExperts(stacks, found, scheme, device)


def _records(parts: list[Part]) -> list[nk.Quantized]:
    """The records of loaded matrices, which are released one after the other."""
    records = []
    while parts:
        part = parts.pop(0)
        assert part.form is not None
        records.append(part.form.record(part.values, part.region))
    return records


def _with_one_scale(records: Sequence[nk.Quantized]) -> list[nk.Quantized]:
    """Records whose inputs are quantized alike: by the largest of their static scales."""
    scales = [
        each.inputs
        for each in records
        if isinstance(each, nk.Fp8) and isinstance(each.inputs, float)
    ]
    if not scales:
        return [*records]
    largest = max(scales)
    return [replace(each, inputs=largest) if isinstance(each, nk.Fp8) else each for each in records]


def _floats(records: Sequence[nk.Quantized], dtype: torch.dtype) -> torch.Tensor:
    """The values of a stack, [E, N, K]."""
    stack = torch.empty(len(records), *records[0].shape, dtype=dtype, device=records[0].device)
    for values, record in zip(stack, records, strict=True):
        values.copy_(record.dense(dtype))
    return stack
