"""AWQ (Lin et al. 2023, arXiv 2306.00978), in the layout "gemm" of AutoAWQ.

Owns the meaning of `quant_method: "awq"` and the order of its columns. Never reads a file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import nv_kernels as nk
import torch

from nv_models.fields import strings
from nv_models.quantization.bits import pack_pairs, unpack
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
from nv_models.quantization.grouped import CARD_ZEROS, group_axis, grouped_bytes, read_group_size
from nv_models.quantization.ignored import is_ignored
from nv_models.quantization.scheme import Scheme
from nv_models.shard import Shard

BITS = 4
PER_WORD = 32 // BITS
FIELDS = [0, 4, 1, 5, 2, 6, 3, 7]
"""Of the 8 rows in a word, the field from the lowest bits on that holds each."""
WORDS = Axis("rows", PER_WORD)


@dataclass(frozen=True)
class AWQForm(Form):
    """Codes of 4 bits, 8 rows to a word, with scales and zero points per group of columns.

    Attributes:
        group_size: columns per scale; None: all of them.
        scale_dtype: of the stored scales.
    """

    group_size: int | None
    scale_dtype: torch.dtype

    def tensors(self, region: Region, device: torch.device) -> dict[str, Shard]:
        """See `Form.tensors`."""
        groups = group_axis(self.group_size)
        return {
            "codes": stored(region, "qweight", (COLUMN, WORDS), torch.int32, device),
            "zeros": stored(region, "qzeros", (groups, WORDS), torch.int32, device),
            "scale": stored(region, "scales", (groups, ROW), self.scale_dtype, device),
        }

    def record(self, values: Mapping[str, torch.Tensor], region: Region) -> nk.Quantized:
        """See `Form.record`."""
        del region  # every slice of whole words is a matrix
        codes, zeros = rows_of(values["codes"]), rows_of(values["zeros"])
        return nk.Grouped(pack_pairs(codes), values["scale"].T.contiguous(), zeros, BITS)

    def num_bytes(self, region: Region) -> int:
        """See `Form.num_bytes`."""
        return grouped_bytes(region, BITS, self.group_size, self.scale_dtype, torch.uint8)

    def card_bytes(self, region: Region) -> int:
        """See `Form.card_bytes`."""
        return grouped_bytes(region, BITS, self.group_size, self.scale_dtype, CARD_ZEROS)

    def fill_dummy(
        self, values: Mapping[str, torch.Tensor], region: Region, generator: torch.Generator
    ) -> None:
        """See `Form.fill_dummy`."""
        del region
        random_words(values["codes"], generator)
        random_words(values["zeros"], generator)
        values["scale"].fill_(DUMMY_STD / 2 ** (BITS - 1))


class AWQScheme(Scheme):
    """The reading of `quant_method: "awq"`."""

    name = "awq"

    def __init__(self, config: Mapping[str, Any], files: Files) -> None:
        """Read a `quantization_config`, or AutoAWQ's quant_config.json.

        Raises:
            NotImplementedError: a variant that is not read.
            ValueError: a field of the wrong type.
        """
        super().__init__()
        self._files = files
        self._ignored = strings(config, "modules_to_not_convert")
        self._group_size = read_group_size(config, "group_size", "q_group_size")
        version = config.get("version", "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise NotImplementedError(
                f"version of the AWQ checkpoint is {version!r}: only 'gemm' is read; use a "
                "checkpoint in that layout"
            )
        if (bits := config.get("bits", config.get("w_bit", BITS))) != BITS:
            raise NotImplementedError(
                f"bits of the AWQ checkpoint is {bits!r}: only {BITS} is read; use a GPTQ "
                "checkpoint with 4 or 8"
            )
        if (has_zeros := config.get("zero_point", True)) is not True:
            raise NotImplementedError(
                f"zero_point of the AWQ checkpoint is {has_zeros!r}: only true is read; use a "
                "checkpoint with zero points"
            )

    def form(self, region: Region) -> Form | None:
        """See `Scheme.form`. The head is in floats."""
        module = region.module
        if module == "lm_head" or is_ignored(module, self._ignored):
            return None
        scale = float_dtype(self._files, f"{module}.scales", torch.float16)
        return AWQForm(self._group_size, scale)


def rows_of(words: torch.Tensor) -> torch.Tensor:
    """Words [K, N / 8] -> codes [N, K] uint8."""
    fields = unpack(words, BITS).view(len(words), -1, PER_WORD)[..., FIELDS]  # [K, N / 8, 8]
    return fields.flatten(1).T.contiguous()
