"""PyTorch's own files, `pytorch_model.bin`: one file, or shards named by an index.

Owns the tensors of the mapped files. A file is unpickled as weights only, so that it runs no code.
"""

from pathlib import Path
from typing import Any

import torch

from nv_models.checkpoint.weight_files import Naming, WeightFiles
from nv_models.pointer import POINTER, is_pointer

NAMING = Naming(
    index="pytorch_model.bin.index.json",
    single="pytorch_model.bin",
    pattern="pytorch_model*.bin",
    format="PyTorch",
)
FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


class PyTorchCheckpoint:
    """The tensors of a folder; files are memory-mapped.

    Files that torch wrote before version 1.6 cannot be mapped: they are read whole.
    """

    def __init__(self, folder: Path) -> None:
        self.place = folder
        files = WeightFiles(folder, NAMING)
        self.broken, self.incomplete = files.broken, files.incomplete
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files.present:
            self._open(file)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def _open(self, file: Path) -> None:
        """Note the file's tensors, or what is wrong with it."""
        try:
            content = _read(file)
        except Exception as error:  # whatever the damaged bytes of a pickle bring about
            lines = str(error).splitlines()
            why = f"is corrupt, or holds more than tensors ({lines[0] if lines else error!r})"
            size = file.stat().st_size
            self.broken.append(f"{file} ({size} bytes) {POINTER if is_pointer(file) else why}")
            return
        if not isinstance(content, dict):
            self.broken.append(f"{file} holds a {type(content).__name__}, not tensors by name")
            return
        for name, tensor in content.items():
            if not isinstance(name, str):
                self.broken.append(f"{name!r:.100} in {file} is not the name of a tensor")
            elif (kind := _not_floats(tensor)) is not None:
                self.broken.append(
                    f"{name} in {file} is {kind}, not plain floats (quantized weights are read "
                    "from safetensors files only)"
                )
            elif name in self._tensors:
                self.broken.append(f"{name} in {file} is also in another file")
            else:
                self._tensors[name] = tensor.detach()

    def name_in_file(self, name: str) -> str:
        """The name itself."""
        return name

    def dtype(self) -> torch.dtype:
        """The dtype of the first tensor."""
        return next((tensor.dtype for tensor in self._tensors.values()), torch.float32)

    def stored(self, name: str) -> torch.dtype:
        """The tensor's dtype."""
        return self._tensors[name].dtype

    def copy(self, name: str, dim: int, start: int, target: torch.Tensor) -> None:
        """Fill `target` with a slice of `name`, converted to its dtype and device."""
        target.copy_(self._tensors[name].narrow(dim, start, target.shape[dim]))


def _not_floats(value: object) -> str | None:
    """The kind of a value that is not a tensor of plain floats in memory."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.dtype not in FLOATS:
        return str(value.dtype)
    if value.is_meta or value.layout != torch.strided:
        return "a tensor on meta" if value.is_meta else str(value.layout)
    return None


def _read(file: Path) -> Any:  # noqa: ANN401
    """The content of a file: tensors by name, if it is right."""
    with file.open("rb") as stream:
        can_map = stream.read(2) == b"PK"  # a zip archive, which torch writes since 1.6
    return torch.load(file, map_location="cpu", weights_only=True, mmap=can_map)
