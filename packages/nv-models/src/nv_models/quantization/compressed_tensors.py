"""compressed-tensors, as llm-compressor writes it (github.com/vllm-project/compressed-tensors).

Owns the meaning of its `config_groups`, and the forms that no other scheme has. Never reads a file.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import nv_kernels as nk
import torch

from nv_models.fields import flag, size, strings, table
from nv_models.quantization.bits import unpack
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
    on_host,
    random_words,
    stored,
)
from nv_models.quantization.fp8 import BLOCK, BLOCKS, Fp8Form, number_axes
from nv_models.quantization.grouped import CARD_ZEROS, group_axis, grouped_bytes, sorted_columns
from nv_models.quantization.scheme import Scheme
from nv_models.shard import Shard

LINEAR = "Linear"
"""The class of every module with a matrix, as torch names it."""
PACKED, INTEGERS, NAIVE, FLOAT = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
)
EXPRESSION = "re:"
BY_GROUP = ("group", "dynamic", True)
"""Values of `actorder` for which the files have the group of each column."""
USE = f"use one of {PACKED}, {INTEGERS} and {FLOAT}, or the checkpoint in floats"


@dataclass(frozen=True)
class PackedForm(Form):
    """Codes of 4 or 8 bits in words of 32, with scales per group of columns.

    Attributes:
        bits: of a code.
        group_size: columns per scale; None: all of a row's.
        is_symmetric: the files lack zero points; each is the middle code.
        has_order: the files have the group of each column (`actorder: "group"`).
        scale_dtype: of the stored scales.
    """

    bits: int
    group_size: int | None
    is_symmetric: bool
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
                f"{region.module} has an order of its columns (actorder), which several ranks "
                "cannot share out: use tensor_parallel_size=1, or a checkpoint whose actorder is "
                '"weight"'
            )
        per_word = 32 // self.bits
        words = Axis("columns", per_word, is_ragged=region.has_all_columns)
        groups = group_axis(self.group_size)
        found = {
            "codes": stored(region, "weight_packed", (ROW, words), torch.int32, device),
            "scale": stored(region, "weight_scale", (ROW, groups), self.scale_dtype, device),
            "shape": stored(region, "weight_shape", (2,), torch.int64, on_host(device)),
        }
        if not self.is_symmetric:
            rows = Axis("rows", per_word, is_ragged=True)
            found["zeros"] = stored(
                region, "weight_zero_point", (rows, groups), torch.int32, device
            )
        if self.has_order:
            found["groups"] = stored(region, "weight_g_idx", (COLUMN,), torch.int32, device)
        return found

    def record(self, values: Mapping[str, torch.Tensor], region: Region) -> nk.Quantized:
        """See `Form.record`."""
        if tuple(values["shape"].tolist()) != region.shape:
            raise ValueError(
                f"{region.module}.weight_shape is {values['shape'].tolist()}: it must be "
                f"{list(region.shape)}; download the checkpoint again"
            )
        rows, columns = region.kept
        codes = values["codes"].view(torch.uint8)[:, : columns * self.bits // 8].contiguous()
        offset = None
        if not self.is_symmetric:
            offset = unpack(values["zeros"].T, self.bits).T[:rows].contiguous()
        order = None
        if self.has_order:
            num_groups = values["scale"].shape[1]
            codes, order = sorted_columns(codes, self.bits, values["groups"], num_groups, region)
        return nk.Grouped(codes, values["scale"], offset, self.bits, order)

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
        values["scale"].fill_(DUMMY_STD / 2 ** (self.bits - 2))
        values["shape"].copy_(torch.tensor(region.shape))
        if "zeros" in values:
            random_words(values["zeros"], generator)
        if "groups" in values:
            columns = torch.arange(region.shape[1])
            values["groups"].copy_(columns // (self.group_size or len(columns)))


@dataclass(frozen=True)
class Int8Form(Form):
    """Integers of 8 bits with a scale per row, or one for all; x is quantized per token.

    Attributes:
        axes: the dimensions of the scales.
    """

    axes: tuple[Axis | int, ...]

    def tensors(self, region: Region, device: torch.device) -> dict[str, Shard]:
        """See `Form.tensors`."""
        return {
            "codes": stored(region, "weight", (ROW, COLUMN), torch.int8, device),
            "scale": stored(region, "weight_scale", self.axes, torch.float32, device),
        }

    def record(self, values: Mapping[str, torch.Tensor], region: Region) -> nk.Quantized:
        """See `Form.record`."""
        del region  # every slice of integers is a matrix
        codes = values["codes"]
        return nk.Int8(codes, values["scale"].flatten().expand(len(codes)).contiguous())

    def num_bytes(self, region: Region) -> int:
        """See `Form.num_bytes`."""
        rows, columns = region.kept
        return rows * columns + 4 * rows

    def fill_dummy(
        self, values: Mapping[str, torch.Tensor], region: Region, generator: torch.Generator
    ) -> None:
        """See `Form.fill_dummy`."""
        del region
        random_words(values["codes"], generator)
        values["scale"].fill_(DUMMY_STD / 64)


class CompressedTensorsScheme(Scheme):
    """The reading of `quant_method: "compressed-tensors"`."""

    name = "compressed-tensors"

    def __init__(self, config: Mapping[str, Any], files: Files) -> None:
        """Read a `quantization_config`.

        Raises:
            NotImplementedError: a variant that is not read.
            ValueError: a field of the wrong type.
        """
        super().__init__()
        self._files = files
        self._ignored = strings(config, "ignore")
        check_targets(self._ignored, "ignore")
        refuse_transformed(config)
        self.has_kv_scales = has_kv_scales(config)
        groups = table(config, "config_groups")
        if not groups:
            raise ValueError("config_groups is empty: it must have a group of modules; correct it")
        self._groups = [
            Group.read(name, table(groups, name), config.get("format")) for name in groups
        ]

    def kv_scale_shape(self, name: str) -> tuple[int, ...]:
        """See `Scheme.kv_scale_shape`."""
        return number_axes(self._files, name, (1,))

    def form(self, region: Region) -> Form | None:
        """See `Scheme.form`."""
        module = region.module
        if any(matches(module, target) or target == LINEAR for target in self._ignored):
            return None
        for is_match in (lambda target: target == module, lambda target: matches(module, target)):
            for group in self._groups:
                if any(is_match(target) for target in group.targets):
                    return group.form(module, self._files)
        whole = [group for group in self._groups if LINEAR in group.targets]
        return whole[0].form(module, self._files) if whole else None


@dataclass(frozen=True)
class Group:
    """One of the `config_groups`: modules of one form.

    Attributes:
        targets: names of modules, expressions after "re:", or classes.
        format: of the files.
        weights: how matrices are quantized.
        inputs: how x is quantized; empty: not at all.
    """

    targets: tuple[str, ...]
    format: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any]

    @classmethod
    def read(cls, name: str, values: Mapping[str, Any], default_format: object) -> "Group":
        """Read a group; `default_format` is that of groups that name none."""
        found = values.get("format") or default_format
        weights, inputs = table(values, "weights"), table(values, "input_activations")
        if found == NAIVE:
            found = INTEGERS if weights.get("type") == "int" else FLOAT
        if found not in (PACKED, INTEGERS, FLOAT):
            raise NotImplementedError(
                f"config_groups.{name} has the format {found!r}, which is not read: {USE}"
            )
        if values.get("output_activations"):
            raise NotImplementedError(
                f"config_groups.{name} quantizes output_activations, which is not computed: {USE}"
            )
        targets = strings(values, "targets")
        if not targets:
            raise ValueError(f"config_groups.{name} has no targets: name its modules")
        check_targets(targets, f"config_groups.{name}.targets")
        return cls(targets, str(found), weights, inputs)

    def form(self, module: str, files: Files) -> Form:
        """The form of a module's matrix."""
        if self.format == PACKED:
            return self._packed(module, files)
        axes = self._scale_axes(module, files)
        if self.format == INTEGERS:
            self._refuse_unless(
                self.weights, num_bits=(8,), type=("int",), symmetric=(True,), dynamic=(False, None)
            )
            self._refuse_unless(
                self.inputs, num_bits=(8,), type=("int",), symmetric=(True,), dynamic=(True,),
                strategy=("token",),
            )  # fmt: skip
            return Int8Form(axes)
        self._refuse_unless(
            self.weights, num_bits=(8,), type=("float",), symmetric=(True,), dynamic=(False, None)
        )
        return self._fp8(module, axes, files)

    def _packed(self, module: str, files: Files) -> Form:
        self._refuse_unless(
            self.weights, num_bits=(4, 8), type=("int",), dynamic=(False, None),
            actorder=(*BY_GROUP, "weight", "static", False, None),
        )  # fmt: skip
        if self.inputs:
            raise NotImplementedError(
                f"a group of the format {PACKED} has input_activations (W4A8), which is not "
                f"computed: use W4A16, W8A16 or W8A8"
            )
        strategy = self.weights.get("strategy")
        grouped = strategy == "group"
        if not grouped and strategy != "channel":
            raise NotImplementedError(
                f"weights.strategy is {strategy!r}: with {PACKED} only 'group' and 'channel' are "
                "read; use another checkpoint"
            )
        return PackedForm(
            bits=self.weights["num_bits"],
            group_size=size(self.weights, "group_size") if grouped else None,
            is_symmetric=flag({"symmetric": True, **self.weights}, "symmetric"),
            has_order=self.weights.get("actorder") in BY_GROUP,
            scale_dtype=float_dtype(files, f"{module}.weight_scale", torch.bfloat16),
        )

    def _scale_axes(self, module: str, files: Files) -> tuple[Axis | int, ...]:
        """The dimensions of the scales of matrices of 8 bits."""
        name = f"{module}.weight_scale"
        match self.weights.get("strategy"):
            case "channel":
                return (ROW,) if len(files.shapes.get(name, (1, 1))) == 1 else (ROW, 1)
            case "tensor":
                return number_axes(files, name, (1,))
            case "block" if self.weights.get("block_structure") == [BLOCK, BLOCK]:
                return BLOCKS
            case other:
                blocks = self.weights.get("block_structure")
                raise NotImplementedError(
                    f"weights.strategy is {other!r} with blocks {blocks!r}: with {self.format} "
                    f"only 'channel', 'tensor' and blocks of [{BLOCK}, {BLOCK}] are read; use "
                    "another checkpoint"
                )

    def _fp8(self, module: str, axes: tuple[Axis | int, ...], files: Files) -> Form:
        if not self.inputs:
            return Fp8Form("weight_scale", axes, None)
        self._refuse_unless(self.inputs, num_bits=(8,), type=("float",), symmetric=(True,))
        is_dynamic, strategy = self.inputs.get("dynamic"), self.inputs.get("strategy")
        if is_dynamic is True and strategy == "token":
            return Fp8Form("weight_scale", axes, "token")
        if is_dynamic is True and strategy == "group" and self.inputs.get("group_size") == BLOCK:
            return Fp8Form("weight_scale", axes, "block")
        if not is_dynamic and strategy == "tensor":
            numbers = number_axes(files, f"{module}.input_scale", (1,))
            return Fp8Form("weight_scale", axes, "static", "input_scale", numbers)
        raise NotImplementedError(
            f"input_activations have the strategy {strategy!r} with dynamic = {is_dynamic!r}: read "
            f"are 'token' and groups of {BLOCK} that are dynamic, and a static 'tensor'; use "
            "another checkpoint"
        )

    def _refuse_unless(self, fields: Mapping[str, Any], **allowed: Sequence[object]) -> None:
        """Refuse a field with another value."""
        for name, values in allowed.items():
            default = True if name == "symmetric" else None
            found = fields.get(name, default)
            if not any(type(found) is type(value) and found == value for value in values):
                raise NotImplementedError(
                    f"{name} is {found!r} in a group of the format {self.format}: it must be one "
                    f"of {', '.join(map(repr, values))}; {USE}"
                )


def check_targets(targets: Sequence[str], field: str) -> None:
    """Raise ValueError if an expression among the targets of a field is none."""
    for target in targets:
        if target.startswith(EXPRESSION):
            check_expression(target.removeprefix(EXPRESSION), field)


def matches(module: str, target: str) -> bool:
    """Whether a target is a module's name, or an expression for it."""
    if target.startswith(EXPRESSION):
        return re.match(target.removeprefix(EXPRESSION), module) is not None
    return target == module


def has_kv_scales(config: Mapping[str, Any]) -> bool:
    """Whether the files have scales for a KV cache in fp8.

    Raises:
        NotImplementedError: for a KV cache of another kind.
    """
    scheme = table(config, "kv_cache_scheme")
    wanted = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    for name, value in wanted.items():
        if scheme and scheme.get(name, value) != value:
            raise NotImplementedError(
                f"kv_cache_scheme has {name} = {scheme[name]!r}: only {value!r} is read; use a "
                'checkpoint without a kv_cache_scheme, and kv_cache_dtype="fp8"'
            )
    return bool(scheme)


def refuse_transformed(config: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for what is done to matrices beside quantizing them."""
    for name in ("sparsity_config", "transform_config"):
        values = table(config, name)
        if values and values.get("format") != "dense":
            raise NotImplementedError(
                f"{name} of the checkpoint is set, which is not read: use a checkpoint that is "
                "only quantized"
            )
    if (status := config.get("quantization_status", "compressed")) != "compressed":
        raise NotImplementedError(
            f"quantization_status is {status!r}: only 'compressed' is read; save the model with "
            "save_compressed=True"
        )
