"""Layers as a loader sees them: they allocate their tensors, name their values, and finish.

Owns Shard, a region of a tensor with its place in the checkpoint. Never reads a file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class Shard:
    """A region of a tensor, and the slice of a checkpoint's tensor that belongs there.

    Args:
        target: the region, a view.
        source: the tensor's full name in the checkpoint.
        shape: of that whole tensor.
        dim: the dimension that the ranks share out.
        start: the first index on it; `target.shape[dim]` of them are taken.
        is_filled: the target has its values already, where the files keep them.
    """

    target: torch.Tensor
    source: str
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    is_filled: bool = False


@runtime_checkable
class Allocated(Protocol):
    """A layer of large tensors, which are made only when their turn to be filled comes."""

    def allocate(self, name: str) -> None:
        """Make the tensors, without values; `name` is the layer's own in the checkpoint."""
        ...


@runtime_checkable
class Sharded(Protocol):
    """A layer with tensors that come from the checkpoint."""

    def shards(self, name: str) -> Iterator[Shard]:
        """The shards of its allocated tensors; `name` is the layer's own in the checkpoint."""
        ...


@runtime_checkable
class Finished(Protocol):
    """A layer whose loaded values become weights of another layout."""

    def finish(self) -> None:
        """Make the weights; tensors that nothing reads afterwards are released."""
        ...
