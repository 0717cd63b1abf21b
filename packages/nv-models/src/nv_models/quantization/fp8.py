"""fp8: codes in e4m3 (Micikevicius et al. 2022, arXiv 2209.05433), scales per matrix or block.

Owns the form, which compressed-tensors has too, and the meaning of `quant_method: "fp8"`
(Qwen3-FP8, DeepSeek-V3). Never reads a file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import nv_kernels as nk
import torch

from nv_models.fields import strings
from nv_models.quantization.form import COLUMN, DUMMY_STD, ROW, Axis, Files, Form, Region, stored
from nv_models.quantization.ignored import is_ignored
from nv_models.quantization.scheme import Scheme
from nv_models.shard import Shard

BLOCK = 128
BLOCKS = Axis("rows", BLOCK, is_ragged=True), Axis("columns", BLOCK, is_ragged=True)
DUMMY_CODES = 16.0
"""The deviation of random codes; a part of them are subnormal, as in a checkpoint."""
STATIC_SCALES = "input_scale", "activation_scale"
BLOCK_SCALE, SCALE = "weight_scale_inv", "weight_scale"
"""Both multiply, whatever the first one is called."""


@dataclass(frozen=True)
class Fp8Form(Form):
    """A matrix in e4m3 and its scales, which multiply the codes.

    Attributes:
        scale: the name of the scales' tensor, after the module's.
        axes: its dimensions: of one number, of a number per row, or of one per block.
        inputs: how the product quantizes x: "token", "block" or None as `nk.Fp8` takes it; or
            "static", by a scale in the files.
        input_scale: the name of that scale's tensor.
        input_axes: its dimensions: none, or one of size 1.
    """

    scale: str
    axes: tuple[Axis | int, ...]
    inputs: Literal["token", "block", "static"] | None
    input_scale: str = STATIC_SCALES[0]
    input_axes: tuple[int, ...] = ()

    def tensors(self, region: Region, device: torch.device) -> dict[str, Shard]:
        """See `Form.tensors`."""
        codes = torch.float8_e4m3fn
        found = {
            "codes": stored(region, "weight", (ROW, COLUMN), codes, device),
            "scale": stored(region, self.scale, self.axes, torch.float32, device),
        }
        if self.inputs == "static":
            found["inputs"] = stored(
                region, self.input_scale, self.input_axes, torch.float32, device
            )
        return found

    def record(self, values: Mapping[str, torch.Tensor], region: Region) -> nk.Quantized:
        """See `Form.record`. A scale of the whole matrix becomes one per row."""
        codes, scale = values["codes"], values["scale"]
        if self.axes != BLOCKS:
            scale = scale.flatten().expand(len(codes)).contiguous()
        inputs: str | float | None = self.inputs
        if self.inputs == "static":
            inputs = _positive(values["inputs"].item(), region)
        return nk.Fp8(codes, scale, inputs)

    def num_bytes(self, region: Region) -> int:
        """See `Form.num_bytes`."""
        rows, columns = region.kept
        if self.axes == BLOCKS:
            return rows * columns + 4 * -(-rows // BLOCK) * -(-columns // BLOCK)
        return rows * columns + 4 * rows

    def fill_dummy(
        self, values: Mapping[str, torch.Tensor], region: Region, generator: torch.Generator
    ) -> None:
        """See `Form.fill_dummy`."""
        del region
        codes = torch.empty_like(values["codes"], dtype=torch.bfloat16)
        values["codes"].copy_(codes.normal_(0.0, DUMMY_CODES, generator=generator))
        values["scale"].fill_(DUMMY_STD / DUMMY_CODES)
        if self.inputs == "static":
            values["inputs"].fill_(DUMMY_STD)


class Fp8Scheme(Scheme):
    """The reading of `quant_method: "fp8"`."""

    name = "fp8"

    def __init__(self, config: Mapping[str, Any], files: Files) -> None:
        """Read a `quantization_config`.

        Args:
            config: its fields.
            files: by which the number of dimensions of a scale is found.

        Raises:
            NotImplementedError: a variant that is not read.
            ValueError: a field of the wrong type.
        """
        super().__init__()
        self._files = files
        self._ignored = strings(config, "modules_to_not_convert") + strings(
            config, "ignored_layers"
        )
        self._has_blocks = _has_blocks(config.get("weight_block_size"))
        self._is_static = _is_static(config.get("activation_scheme", "dynamic"))
        if self._has_blocks and self._is_static:
            raise NotImplementedError(
                'activation_scheme is "static" beside weight_block_size, which is not read; use a '
                'checkpoint with "dynamic"'
            )
        for name, usual in (("fmt", "e4m3"), ("scale_fmt", "float")):
            if config.get(name) not in (None, usual):
                raise NotImplementedError(
                    f"{name} of the fp8 checkpoint is {config[name]!r}: only {usual!r} is read; "
                    "use another checkpoint"
                )

    def form(self, region: Region) -> Form | None:
        """See `Scheme.form`. The head is in floats."""
        module = region.module
        if module == "lm_head" or is_ignored(module, self._ignored):
            return None
        if self._has_blocks:
            return Fp8Form(BLOCK_SCALE, BLOCKS, "block")
        scale = SCALE if f"{module}.{BLOCK_SCALE}" not in self._files.shapes else BLOCK_SCALE
        axes = number_axes(self._files, f"{module}.{scale}", ())
        if not self._is_static:
            return Fp8Form(scale, axes, "token")
        own, other = STATIC_SCALES
        static = own if f"{module}.{other}" not in self._files.shapes else other
        return Fp8Form(
            scale, axes, "static", static, number_axes(self._files, f"{module}.{static}", ())
        )


def number_axes(files: Files, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions of a tensor of one number: files have it with none, or with sizes of 1."""
    shape = files.shapes.get(name, default)
    return shape if all(size == 1 for size in shape) else default


def _has_blocks(value: object) -> bool:
    if value is None:
        return False
    if value != [BLOCK, BLOCK]:
        raise NotImplementedError(
            f"weight_block_size is {value!r}: only [{BLOCK}, {BLOCK}] is read; use a checkpoint "
            "with these blocks, or with a scale per tensor or per row"
        )
    return True


def _is_static(value: object) -> bool:
    if value not in ("dynamic", "static"):
        raise NotImplementedError(
            f'activation_scheme is {value!r}: only "dynamic" and "static" are read; use another '
            "checkpoint"
        )
    return value == "static"


def _positive(value: float, region: Region) -> float:
    if not 0 < value < float("inf"):
        raise ValueError(
            f"the scale of {region.module}'s inputs is {value}: it must be positive and finite; "
            "download the checkpoint again"
        )
    return value
