"""Safetensors folders: one file, or shards named by an index.

Owns open files and the slices read from them. Never holds a whole tensor longer than one copy.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nv_models.pointer import POINTER, is_pointer

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class SafetensorsCheckpoint:
    """The tensors of a folder; files are memory-mapped, so opening reads only their headers."""

    def __init__(self, folder: Path) -> None:
        self.place = folder
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.broken: list[str] = []
        self.incomplete = False
        self._files: dict[str, Any] = {}  # tensor name -> open file
        for file in self._listed(folder):
            self._open(file)

    def _listed(self, folder: Path) -> list[Path]:
        """The files to read: what the index names, or one, or all; one that is gone is noted.

        The index comes first, as in vLLM, unless none of its files is there and `model.safetensors`
        is. Other files are other formats of the model, or adapters.
        """
        single, index = folder / SINGLE, folder / INDEX
        has_single = single.exists() or single.is_symlink()
        if index.exists():
            indexed = self._indexed(index)
            if not has_single or any(map(os.path.lexists, indexed)):
                return self._present(indexed)
        files = [single] if has_single else sorted(folder.glob("*.safetensors"))
        return self._present(files)

    def _indexed(self, index: Path) -> list[Path]:
        """The files that an index names."""
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"]
            return [index.parent / name for name in sorted(set(weight_map.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = POINTER if is_pointer(index) else f"is not a safetensors index ({error!r})"
            self.broken.append(f"{index} {why}")
            return []

    def _present(self, files: list[Path]) -> list[Path]:
        """Those of the files that are there; the others are noted."""
        for file in files:
            if file.exists():
                continue
            self.incomplete = True
            if file.is_symlink():
                gone = f"{file} links to {file.readlink()}, which is gone (a pruned hub cache?)"
                self.broken.append(gone)
            else:
                self.broken.append(f"{file} is missing, though {INDEX} names it")
        return [file for file in files if file.exists()]

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
            if view.get_dtype() not in DTYPES:
                self.broken.append(f"{name} in {file} is {view.get_dtype()}, not plain floats")
            if name in self._shapes:
                self.broken.append(f"{name} in {file} is also in another file")
            self._shapes[name] = tuple(view.get_shape())
            self._files[name] = opened

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor of every file that could be opened."""
        return self._shapes

    def name_in_file(self, name: str) -> str:
        """The name itself."""
        return name

    def dtype(self) -> torch.dtype:
        """The dtype of the first tensor."""
        for name, file in self._files.items():
            return DTYPES.get(file.get_slice(name).get_dtype(), torch.float32)
        return torch.float32

    def copy(self, name: str, dim: int, start: int, target: torch.Tensor) -> None:
        """Fill `target` with a slice of `name`, converted to its dtype and device."""
        view = self._files[name].get_slice(name)
        kept = (slice(None),) * dim + (slice(start, start + target.shape[dim]),)
        with torch.device("cpu"):  # else it is the default device, whatever a user made that
            values = view[kept]
        target.copy_(values)
