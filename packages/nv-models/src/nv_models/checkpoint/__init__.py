"""Where weights come from.

Owns: the interface that both formats answer to. Never: knows a model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch


class Checkpoint(Protocol):
    """Named tensors in files, read a slice at a time.

    `place` is the file or folder that the user can replace. `broken` lists what is wrong with the
    files themselves, one sentence each; `incomplete` says that one of them is not there at all.
    """

    place: Path
    broken: list[str]
    incomplete: bool

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor that can be read, by name."""
        ...

    def name_in_file(self, name: str) -> str:
        """A tensor's name, and what the files call it where that is another."""
        ...

    def dtype(self) -> torch.dtype:
        """The dtype that the weights are meant to be computed in."""
        ...

    def copy(self, name: str, dim: int, start: int, target: torch.Tensor) -> None:
        """Fill `target` with `target.shape[dim]` indices of `name` from `start` on along `dim`."""
        ...
