"""GPTQ (Frantar et al. 2022, arXiv 2210.17323), as AutoGPTQ and GPTQModel write it.

Owns the meaning of `quant_method: "gptq"`: both ways to store zero points, the order of columns,
and the rules for single modules. Never reads a file.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import nv_kernels as nk
import torch

from nv_models.fields import flag, strings, table
from nv_models.quantization.bits import pack_pairs, unpack
from nv_models.quantization.expression import check_expression
from nv_models.quantization.form import (
    COLUMN,
    DUMMY_STD,
    ROW,
    Axis,
    Files,
    Form,
    Region,
    float_dtype,
    random_words,
    stored,
)
from nv_models.quantization.grouped import (
    CARD_ZEROS,
    group_axis,
    grouped_bytes,
    read_group_size,
    sorted_columns,
)
from nv_models.quantization.scheme import Scheme
from nv_models.shard import Shard

V1, V2 = "gptq", "gptq_v2"
"""Files that store zero points less 1, and as they are."""
MODULES = "modules_in_block_to_quantize"
RULED = ("bits", "group_size", "sym", "desc_act")
"""Fields that a rule may give single modules."""


@dataclass(frozen=True)
class GPTQForm(Form):
    """Codes of 4 or 8 bits, several columns to a word, with scales per group of columns.

    Attributes:
        bits: of a code.
        group_size: columns per scale; None: all of them.
        is_symmetric: every zero point is the middle, 2^(bits - 1).
        is_v1: the files store zero points less 1.
        has_groups: the files have the group of each column.
        has_order: these groups are in an order of activations (`desc_act`).
        scale_dtype: of the stored scales.
    """

    bits: int
    group_size: int | None
    is_symmetric: bool
    is_v1: bool
    has_groups: bool
    has_order: bool
    scale_dtype: torch.dtype

    @property
    def is_ordered(self) -> bool:
        """See `Form.is_ordered`."""
        return self.has_order

    def tensors(self, region: Region, device: torch.device) -> dict[str, Shard]:
        """See `Form.tensors`."""
        if self.has_order and not region.has_all_columns:
            raise ValueError(
                f"{region.module} has an order of its columns (desc_act), which several ranks "
                "cannot share out: use tensor_parallel_size=1, or a checkpoint whose desc_act is "
                "false"
            )
        per_word = 32 // self.bits
        groups = group_axis(self.group_size)
        words, zeros = Axis("columns", per_word), Axis("rows", per_word)
        found = {
            "codes": stored(region, "qweight", (words, ROW), torch.int32, device),
            "zeros": stored(region, "qzeros", (groups, zeros), torch.int32, device),
            "scale": stored(region, "scales", (groups, ROW), self.scale_dtype, device),
        }
        if self.has_groups:
            found["groups"] = stored(region, "g_idx", (COLUMN,), torch.int32, device)
        return found

    def record(self, values: Mapping[str, torch.Tensor], region: Region) -> nk.Quantized:
        """See `Form.record`."""
        codes = unpack(values["codes"].T, self.bits)  # [N, K]
        if self.bits == 4:
            codes = pack_pairs(codes)
        zeros = unpack(values["zeros"], self.bits).T.contiguous()  # [N, G]
        if self.is_v1:
            zeros = zeros + 1 & 2**self.bits - 1
        offset = None if self.is_symmetric and (zeros == 2 ** (self.bits - 1)).all() else zeros
        order = None
        groups = values.get("groups")
        is_unset = groups is not None and not self.has_order and bool((groups == groups[0]).all())
        if groups is not None and not is_unset:
            codes, order = sorted_columns(codes, self.bits, groups, zeros.shape[1], region)
        return nk.Grouped(codes, values["scale"].T.contiguous(), offset, self.bits, order)

    def num_bytes(self, region: Region) -> int:
        """See `Form.num_bytes`."""
        return self._bytes(region, torch.uint8)

    def card_bytes(self, region: Region) -> int:
        """See `Form.card_bytes`."""
        return self._bytes(region, CARD_ZEROS)

    def _bytes(self, region: Region, zeros: torch.dtype) -> int:
        """Bytes with zero points of this type."""
        offset = None if self.is_symmetric else zeros
        return grouped_bytes(
            region, self.bits, self.group_size, self.scale_dtype, offset, has_order=self.has_order
        )

    def fill_dummy(
        self, values: Mapping[str, torch.Tensor], region: Region, generator: torch.Generator
    ) -> None:
        """See `Form.fill_dummy`."""
        random_words(values["codes"], generator)
        values["scale"].fill_(DUMMY_STD / 2 ** (self.bits - 1))
        middle = 2 ** (self.bits - 1) - self.is_v1
        values["zeros"].view(torch.uint8).fill_(middle if self.bits == 8 else middle * 17)
        if "groups" in values:
            columns = torch.arange(region.columns.start, region.columns.stop)
            values["groups"].copy_(columns // (self.group_size or region.shape[1]))


class GPTQScheme(Scheme):
    """The reading of `quant_method: "gptq"`."""

    name = "gptq"

    def __init__(self, config: Mapping[str, Any], files: Files) -> None:
        """Read a `quantization_config`, or AutoGPTQ's quantize_config.json.

        Raises:
            NotImplementedError: a variant that is not read.
            ValueError: a field of the wrong type.
        """
        super().__init__()
        self._config, self._files = config, files
        self._has_head = flag(config, "lm_head")
        rules = table(config, "dynamic")
        self._rules = [(name, table(rules, name)) for name in rules]
        for name in rules:
            check_expression(name.removeprefix("-:").removeprefix("+:"), "dynamic")
        self._is_v1 = _is_v1(config)
        self._inside = _modules_inside(config)
        self._form(self._config, "")  # refuses what no module could have

    def form(self, region: Region) -> Form | None:
        """See `Scheme.form`."""
        module = region.module
        if module == "lm_head" and not self._has_head:
            return None
        for pattern, fields in self._rules:
            if not re.match(pattern.removeprefix("-:").removeprefix("+:"), module):
                continue
            if pattern.startswith("-:"):
                return None
            ruled = {name: fields[name] for name in RULED if name in fields}
            return self._form({**self._config, **ruled}, module)
        if module != "lm_head" and self._inside and not module.endswith(self._inside):
            return None
        return self._form(self._config, module)

    def _form(self, config: Mapping[str, Any], module: str) -> Form:
        bits = config.get("bits")
        if type(bits) is not int or bits not in (4, 8):
            raise NotImplementedError(
                f"bits of the GPTQ checkpoint is {bits!r}: only 4 and 8 are read; use a checkpoint "
                "with one of these"
            )
        group_size = read_group_size(config, "group_size")
        has_order = flag(config, "desc_act") and group_size is not None
        has_groups = has_order or f"{module}.g_idx" in self._files.shapes
        return GPTQForm(
            bits=bits,
            group_size=group_size,
            is_symmetric=flag({"sym": True, **config}, "sym"),
            is_v1=self._is_v1,
            has_groups=has_groups,
            has_order=has_order,
            scale_dtype=float_dtype(self._files, f"{module}.scales", torch.float16),
        )


def _is_v1(config: Mapping[str, Any]) -> bool:
    """Whether zero points are stored less 1, as where no format is named."""
    name = config.get("checkpoint_format") or config.get("format") or V1
    if name not in (V1, V2) or config.get("is_marlin_format"):
        name = "marlin" if config.get("is_marlin_format") else name
        raise NotImplementedError(
            f"format of the GPTQ checkpoint is {name!r}: only {V1!r} and {V2!r} are read; use a "
            "checkpoint in one of these, which runs as fast"
        )
    if (word := config.get("pack_dtype", "int32")) != "int32":
        raise NotImplementedError(
            f"pack_dtype of the GPTQ checkpoint is {word!r}: only 'int32' is read; use another "
            "checkpoint"
        )
    return bool(name == V1)


def _modules_inside(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The ends of the names of quantized modules; empty: all are."""
    groups = config.get(MODULES) or []
    if not isinstance(groups, list):
        raise ValueError(f"{MODULES} is {groups!r:.200}: it must be a list of lists of names")
    flat = [each for group in groups for each in (group if isinstance(group, list) else [group])]
    return tuple(f".{name}" for name in strings({MODULES: flat}, MODULES))
