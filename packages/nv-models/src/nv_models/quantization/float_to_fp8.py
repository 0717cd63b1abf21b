"""fp8 made of a checkpoint in floats while it loads: `quantization="fp8"`.

Owns the form of such a matrix. In memory there is one matrix of floats at a time,
or those of one layer's experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import nv_kernels as nk
import torch

from nv_models.quantization.form import DUMMY_STD, Files, Form, Region, float_dtype
from nv_models.quantization.ignored import is_ignored
from nv_models.quantization.scheme import Scheme
from nv_models.shard import Shard

ROUTERS = ("gate", "router")
"""The last parts of the names of routers, whose choice of experts is left as it is."""
VALUES = 1 << 21
"""Quantized at once: their copies in fp32 take some MiB."""


@dataclass(frozen=True)
class FloatToFp8Form(Form):
    """A matrix of floats that becomes e4m3 with a scale per row.

    Attributes:
        dtype: of the stored floats.
    """

    dtype: torch.dtype

    def tensors(self, region: Region, device: torch.device) -> dict[str, Shard]:
        """See `Form.tensors`."""
        return {"weight": region.shard(torch.empty(region.kept, dtype=self.dtype, device=device))}

    def record(self, values: Mapping[str, torch.Tensor], region: Region) -> nk.Quantized:
        """See `Form.record`."""
        rows = max(1, VALUES // region.kept[1])
        parts = [nk.quantize_fp8(some) for some in torch.split(values["weight"], rows)]
        return parts[0] if len(parts) == 1 else nk.Fp8.stack(parts)

    def num_bytes(self, region: Region) -> int:
        """See `Form.num_bytes`."""
        rows, columns = region.kept
        return rows * columns + 4 * rows

    def fill_dummy(
        self, values: Mapping[str, torch.Tensor], region: Region, generator: torch.Generator
    ) -> None:
        """See `Form.fill_dummy`."""
        del region
        values["weight"].normal_(0.0, DUMMY_STD, generator=generator)


class FloatToFp8Scheme(Scheme):
    """All linear layers but the head and routers."""

    name = "fp8"
    quantizes_floats = True

    def __init__(self, files: Files, ignored: Sequence[str] = ()) -> None:
        """Quantize what `ignored` does not name.

        Args:
            files: by which the dtype of stored floats is found.
            ignored: modules that stay in floats, as `is_ignored` takes them.
        """
        super().__init__()
        self._files, self._ignored = files, ignored

    def form(self, region: Region) -> Form | None:
        """See `Scheme.form`."""
        module = region.module
        is_left = module == "lm_head" or module.rpartition(".")[2] in ROUTERS
        if is_left or is_ignored(module, self._ignored):
            return None
        return FloatToFp8Form(float_dtype(self._files, f"{module}.weight", torch.bfloat16))
