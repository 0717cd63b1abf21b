"""Linear layers whose weights are shared out over tensor-parallel ranks.

Owns: the pair of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053): a column layer splits the
output features and needs no sum; a row layer splits the input features and ends in one.
Never: knows what the features mean, or multiplies: `nv_kernels.linear.chain` does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from nv_models.placement import Placement, Shard


@dataclass(frozen=True)
class Part:
    """One of the checkpoint's matrices that are stacked in a column layer.

    Args:
        source: its module's name in the checkpoint, beside this one's.
        total: how many units it has over all ranks.
        kept: the units that this rank holds.
        unit: rows a unit: head_dim, or 1.
    """

    source: str
    total: int
    kept: range
    unit: int = 1

    @property
    def rows(self) -> int:
        """Rows on this rank."""
        return len(self.kept) * self.unit


class ColumnLinear(nn.Module):
    """x [T, K] -> [T, N of this rank]; the parts' outputs stand side by side in N."""

    def __init__(
        self, in_features: int, parts: Sequence[Part], bias: bool, placement: Placement
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        rows = sum(part.rows for part in self.parts)
        self.weight = placement.empty(rows, in_features)  # [N, K]
        self.bias = placement.empty(rows) if bias else None  # [N]

    def shards(self, name: str) -> Iterator[Shard]:
        """Each part's rows, one below the other."""
        parent = name.rpartition(".")[0]
        in_features = self.weight.shape[1]
        first = 0
        for part in self.parts:
            rows = slice(first, first + part.rows)
            source = f"{parent}.{part.source}"
            total, start = part.total * part.unit, part.kept.start * part.unit
            yield Shard(self.weight[rows], f"{source}.weight", (total, in_features), 0, start)
            if self.bias is not None:
                yield Shard(self.bias[rows], f"{source}.bias", (total,), 0, start)
            first = rows.stop


class RowLinear(nn.Module):
    """x [T, K of this rank] -> [T, N], summed over the ranks."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, placement: Placement
    ) -> None:
        super().__init__()
        self.parallel = placement.parallel
        self.in_features = in_features
        self.kept = self.parallel.split(in_features, "the input features")
        self.weight = placement.empty(out_features, len(self.kept))  # [N, K]
        self.bias = placement.empty(out_features) if bias else None  # [N]

    @property
    def own_bias(self) -> torch.Tensor | None:
        """What this rank adds: the bias enters the sum over the ranks once, from rank 0."""
        return self.bias if self.parallel.rank == 0 else None

    def shards(self, name: str) -> Iterator[Shard]:
        """This rank's columns, and the whole bias."""
        out_features = self.weight.shape[0]
        shape = (out_features, self.in_features)
        yield Shard(self.weight, f"{name}.weight", shape, 1, self.kept.start)
        if self.bias is not None:
            yield Shard(self.bias, f"{name}.bias", (out_features,))
