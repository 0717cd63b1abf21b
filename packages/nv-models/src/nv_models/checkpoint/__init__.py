"""The files that weights come from.

Owns the interface of both formats. Never depends on a model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch


class Checkpoint(Protocol):
    """Named tensors in files, read a slice at a time.

    `place` is the file or folder that the user can replace. `broken` lists the errors of the files
    themselves, one sentence each; `incomplete` is true if a file is missing.
    """

    place: Path
    broken: list[str]
    incomplete: bool

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor that can be read, by name; made once, as a loader asks often."""
        ...

    def name_in_file(self, name: str) -> str:
        """A tensor's name, and its name in the files where that is another."""
        ...

    def dtype(self) -> torch.dtype:
        """The dtype that the weights are meant to be computed in."""
        ...

    def stored(self, name: str) -> torch.dtype | None:
        """The dtype in which `copy` reads a tensor: a float type, or that of codes.

        None: one that is not read, and that `broken` names.
        """
        ...

    def copy(self, name: str, dim: int, start: int, target: torch.Tensor) -> None:
        """Fill `target` with `target.shape[dim]` indices of `name` from `start` on along `dim`."""
        ...
