"""A scheme: which matrices of a checkpoint are quantized, and in which form.

Owns the interface, and the list of the matrices that could not stay quantized. Never reads a file.
"""

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass

from nv_models.listing import first_few
from nv_models.quantization.form import Form, Region

MIB = 2**20


@dataclass(frozen=True)
class Dequantized:
    """A matrix that was dequantized while it was loaded.

    Attributes:
        modules: whose matrices it has.
        num_bytes: of its floats.
        reason: why it could not stay quantized.
    """

    modules: tuple[str, ...]
    num_bytes: int
    reason: str


class Scheme(ABC):
    """The reading of a checkpoint's `quantization_config`.

    Attributes:
        name: its `quant_method`.
        has_kv_scales: the files have scales for an fp8 KV cache.
        quantizes_floats: the files are in floats, and codes are made while they load.
        dequantized: the matrices that could not stay quantized, so far, by their modules.
    """

    name: str
    has_kv_scales = False
    quantizes_floats = False

    def __init__(self) -> None:
        self.dequantized: dict[tuple[str, ...], Dequantized] = {}

    def embedding_form(self, region: Region) -> Form | None:
        """How the files keep an embedding whose rows are looked up in codes; None: as floats."""
        del region  # only blocks that lie in a mapped file are used so
        return None

    def kv_scale_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a scale of the KV cache: one number, of no dimension or of several."""
        raise KeyError(name)

    @abstractmethod
    def form(self, region: Region) -> Form | None:
        """How the files keep the matrix of a linear layer; None: as plain floats."""

    def note(self, each: Dequantized) -> None:
        """Note a matrix for the warning; noted twice, it counts once."""
        self.dequantized[each.modules] = each

    def warn_of_dequantized(self, place: object) -> None:
        """Warn once of all matrices that were dequantized, and forget them."""
        gone, self.dequantized = [*self.dequantized.values()], {}
        if not gone:
            return
        size = sum(each.num_bytes for each in gone) / MIB
        names = first_few([module for each in gone for module in each.modules])
        warnings.warn(
            f"{place}: dequantized, as floats of {size:.1f} MiB, are {', '.join(names)}: "
            f"{gone[0].reason}",
            stacklevel=2,
        )
