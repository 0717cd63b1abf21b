"""Where a model's tensors live.

Owns Placement, which every layer takes as an argument, and the two things that a loader asks of a
layer: where its values are in the checkpoint, and to finish once they are loaded. Never reads a
file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import nv_kernels as nk
import torch
from torch import nn

from nv_models.parallel import TensorParallel


@dataclass(frozen=True)
class Placement:
    """One rank's share of a model, on one device, in one dtype."""

    device: torch.device
    dtype: torch.dtype
    parallel: TensorParallel
    arithmetic: nk.Arithmetic

    def rank_sum(self) -> nk.RankSum | None:
        """The sum over the ranks in which a row layer's products end; None with one rank."""
        return None if self.parallel.size == 1 else self.arithmetic.rank_sum(self.parallel)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialized parameter that never asks for a gradient; None: the model's dtype."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)

    def zeros(self, *shape: int) -> nn.Parameter:
        """A parameter of zeros that never asks for a gradient."""
        tensor = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)


@dataclass(frozen=True)
class Shard:
    """A region of a parameter, and the slice of a checkpoint's tensor that belongs there.

    Args:
        target: the region, a view.
        source: the tensor's full name in the checkpoint.
        shape: of that whole tensor.
        dim: the dimension that the ranks share out.
        start: the first index on it; `target.shape[dim]` of them are taken.
    """

    target: torch.Tensor
    source: str
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0


@runtime_checkable
class Sharded(Protocol):
    """A layer with parameters that come from the checkpoint."""

    def shards(self, name: str) -> Iterator[Shard]:
        """The shards of its parameters; `name` is the layer's own in the checkpoint."""
        ...


@runtime_checkable
class Finished(Protocol):
    """A layer whose loaded values become weights of another layout."""

    def finish(self) -> None:
        """Make the weights; parameters that nothing reads afterwards are released."""
        ...
