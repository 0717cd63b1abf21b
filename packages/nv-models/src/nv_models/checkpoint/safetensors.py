"""Safetensors folders: one file, or shards named by an index.

Owns open files and the slices read from them. Never holds a whole tensor longer than one copy.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nv_models.checkpoint.mxfp4 import is_packed
from nv_models.checkpoint.weight_files import Naming, WeightFiles
from nv_models.pointer import POINTER, is_pointer

NAMING = Naming(
    index="model.safetensors.index.json",
    single="model.safetensors",
    pattern="*.safetensors",
    format="safetensors",
)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
CODES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Of quantized weights."""
READ = DTYPES | CODES


class SafetensorsCheckpoint:
    """The tensors of a folder; files are memory-mapped, so opening reads only their headers."""

    def __init__(self, folder: Path) -> None:
        self.place = folder
        files = WeightFiles(folder, NAMING)
        self.broken, self.incomplete = files.broken, files.incomplete
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}  # tensor name -> open file
        for file in files.present:
            self._open(file)

    def _open(self, file: Path) -> None:
        """Note the file's tensors, or what is wrong with it."""
        try:
            opened: Any = safe_open(file, framework="pt")
            names = opened.keys()
        except (SafetensorError, OSError) as error:
            size = file.stat().st_size
            why = POINTER if is_pointer(file) else f"is corrupt or truncated ({error})"
            self.broken.append(f"{file} ({size} bytes) {why}")
            return
        for name in names:
            view = opened.get_slice(name)
            wanted = {"U8"} if is_packed(name) else READ.keys()
            if view.get_dtype() not in wanted:
                kinds = ", ".join(sorted(wanted))
                self.broken.append(f"{name} in {file} is {view.get_dtype()}: read are {kinds}")
            if name in self.shapes:
                self.broken.append(f"{name} in {file} is also in another file")
            self.shapes[name] = tuple(view.get_shape())
            self._files[name] = opened

    def name_in_file(self, name: str) -> str:
        """The name itself."""
        return name

    def dtype(self) -> torch.dtype:
        """The dtype of the first tensor of floats."""
        stored = (file.get_slice(name).get_dtype() for name, file in self._files.items())
        return next((DTYPES[dtype] for dtype in stored if dtype in DTYPES), torch.float32)

    def stored(self, name: str) -> torch.dtype | None:
        """The tensor's dtype; None: it is not read, and listed in `broken`."""
        return READ.get(self._files[name].get_slice(name).get_dtype())

    def copy(self, name: str, dim: int, start: int, target: torch.Tensor) -> None:
        """Fill `target` with a slice of `name`, converted to its dtype and device."""
        view = self._files[name].get_slice(name)
        if not target.ndim:
            target.copy_(_read(view, ()))
            return
        kept = (slice(None),) * dim + (slice(start, start + target.shape[dim]),)
        if dim and target.ndim > 2:  # of a stack a matrix at a time: it may take gigabytes
            for index, matrix in enumerate(target):
                matrix.copy_(_read(view, (index, *kept[1:])))
        else:
            target.copy_(_read(view, kept))


def _read(view: Any, kept: tuple[Any, ...]) -> torch.Tensor:  # noqa: ANN401
    """Some of a tensor's values in memory."""
    with torch.device("cpu"):  # else it is the default device, whatever a user made that
        values: torch.Tensor = view[kept]
    return values
