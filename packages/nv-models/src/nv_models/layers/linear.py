"""Linear layers whose weights are shared out over tensor-parallel ranks.

Owns the pair of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053). A column layer splits the
output features; it reads the residual stream through a norm and needs no sum. A row layer splits
the input features, sums over the ranks and adds to the stream. Never chooses a kernel: `nk.Weight`
does.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import nv_kernels as nk
import torch
from torch import nn

from nv_models.layers.layer import Layer
from nv_models.placement import Placement
from nv_models.quantization.form import Region
from nv_models.quantization.matrix import LoadedMatrix, allocated
from nv_models.shard import Shard


@dataclass(frozen=True)
class Part:
    """One of the checkpoint's matrices that are stacked in a column layer.

    Args:
        source: its module's name in the checkpoint, beside this one's.
        total: how many units it has over all ranks.
        kept: the units that this rank holds.
        unit: rows per unit: head_dim, or 1.
        first: where its rows begin, if they are some of the rows of a fused tensor.
        fused: the rows of that whole tensor; None: the tensor is this part.
        pairs: of each unit, so many rows are pairs of neighbours that a rotary embedding turns;
            they are put in the order of halves: the first of each pair, then the second.
    """

    source: str
    total: int
    kept: range
    unit: int = 1
    first: int = 0
    fused: int | None = None
    pairs: int = 0

    @property
    def rows(self) -> int:
        """Rows on this rank."""
        return len(self.kept) * self.unit

    @property
    def start(self) -> int:
        """This rank's first row in the checkpoint's tensor."""
        return self.first + self.kept.start * self.unit

    def order(self) -> torch.Tensor:
        """Which of this rank's loaded rows is its i-th row: [rows]."""
        rows = torch.arange(self.rows, device="cpu").view(-1, self.unit)
        turned, others = rows[:, : self.pairs], rows[:, self.pairs :]
        return torch.cat((turned[:, ::2], turned[:, 1::2], others), 1).flatten()


def side_by_side(source: str, parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts as the rows of one fused tensor, in their order."""
    fused, first, placed = sum(part.total * part.unit for part in parts), 0, []
    for part in parts:
        placed.append(replace(part, source=source, first=first, fused=fused))
        first += part.total * part.unit
    return tuple(placed)


class Linear(Layer, ABC):
    """A matrix and perhaps a bias.

    Attributes:
        shape: (N, K) on this rank.
        values: [N, K], made by `allocate`, filled by the loader and released by `finish`.
        matrix: the tensors of quantized parts, in place of `values`; None: all are floats.
        bias: [N] or None; made by `allocate`.
        weight: the matrix and its products, made by `finish` once the values are loaded.
        lora: adapters beside it, made by an `AdapterPool`; None: it has none.
    """

    values: nn.Parameter
    bias: nn.Parameter | None
    weight: nk.Weight

    def __init__(self, rows: int, columns: int, bias: bool, placement: Placement) -> None:
        super().__init__()
        self.shape = rows, columns
        self.has_bias = bias
        self.placement = placement
        self.matrix: LoadedMatrix | None = None
        self.lora: nk.LoraWeights | None = None

    def product(self, lora: nk.LoraPlan | None) -> nk.Weight:
        """The weight, with the adapters of a step's tokens beside it if some have one."""
        if lora is None or self.lora is None:
            return self.weight
        return self.weight.adapted(self.lora, lora)

    @abstractmethod
    def regions(self, name: str) -> list[Region]:
        """The checkpoint's matrices that lie one below the other; `name` is the layer's own."""

    def orders(self) -> list[torch.Tensor | None]:
        """Of each region, which of its loaded rows is its i-th row; None: they are in order."""
        return [None]

    def allocate(self, name: str) -> None:
        """Make the tensors that the loader fills."""
        placement = self.placement
        regions = [*zip(self.regions(name), self.orders(), strict=True)]
        self.matrix = allocated(regions, placement.scheme, placement.dtype, placement.device)
        if self.matrix is None:
            self.values = placement.empty(*self.shape)
        self.bias = placement.empty(self.shape[0]) if self.has_bias else None

    def matrix_shards(self, name: str) -> Iterator[Shard]:
        """Where the values of the matrix come from."""
        if self.matrix is not None:
            yield from self.matrix.shards()
            return
        first = 0
        for region in self.regions(name):
            rows = slice(first, first + len(region.rows))
            yield region.shard(self.values[rows])
            first = rows.stop

    def finish(self) -> None:
        """Lay the values out as the device multiplies fastest; the loaded ones are released."""
        arithmetic = self.placement.arithmetic
        if self.matrix is not None:
            self.weight = self.matrix.weight(arithmetic.quantized, arithmetic.weight)
            self.matrix = None
        else:
            self.weight = arithmetic.weight(self.values.detach())
            del self.values


class ColumnLinear(Linear):
    """The normed stream [T, K] -> [T, N of this rank]; the parts' outputs are side by side in N."""

    def __init__(
        self, in_features: int, parts: Sequence[Part], bias: bool, placement: Placement
    ) -> None:
        super().__init__(sum(part.rows for part in parts), in_features, bias, placement)
        self.parts = tuple(parts)

    def regions(self, name: str) -> list[Region]:
        """Each part's rows."""
        parent, columns = name.rpartition(".")[0], range(self.shape[1])
        return [
            Region(
                f"{parent}.{part.source}",
                (part.fused or part.total * part.unit, self.shape[1]),
                range(part.start, part.start + part.rows),
                columns,
            )
            for part in self.parts
        ]

    def orders(self) -> list[torch.Tensor | None]:
        """Rotated rows are put in the order of halves."""
        return [part.order() if part.pairs else None for part in self.parts]

    def finish(self) -> None:
        """Put rotated rows in the order of halves, then lay the values out."""
        first = 0
        for part, order in zip(self.parts, self.orders(), strict=True):
            rows = slice(first, first + part.rows)
            if order is not None:
                if self.matrix is None:
                    self.values[rows] = self.values[rows][order]
                if self.bias is not None:
                    self.bias[rows] = self.bias[rows][order]
            first = rows.stop
        super().finish()

    def forward(
        self, stream: nk.Stream, norm: nk.Norm | None, lora: nk.LoraPlan | None = None
    ) -> tuple[torch.Tensor, nk.Stream]:
        """Add what is pending to the stream, norm it if there is a norm, and multiply.

        Args:
            stream: the residual.
            norm: None: the product reads the stream itself.
            lora: the adapters of the step's tokens; None: no token has one.

        Returns:
            [T, N of this rank], or on a card partials [P, T, N of this rank], which only an op that
            sums partials may read (see `nk.Weight.norm_linear`); and the stream after the addition.
        """
        weight = self.product(lora)
        if norm is None:
            stream = nk.add_pending(stream)
            return weight.partials(stream.hidden, self.bias), stream
        return weight.norm_linear(stream, norm, self.bias)

    def whole(
        self, stream: nk.Stream, norm: nk.Norm | None, lora: nk.LoraPlan | None = None
    ) -> tuple[torch.Tensor, nk.Stream]:
        """As `forward`, and the product is never partials: for an op that does not sum them."""
        weight = self.product(lora)
        if norm is None:
            stream = nk.add_pending(stream)
            return weight.linear(stream.hidden, self.bias), stream
        normed, stream = nk.normalise(stream, norm)
        return weight.linear(normed, self.bias), stream

    def shards(self, name: str) -> Iterator[Shard]:
        """Each part's rows, one below the other."""
        yield from self.matrix_shards(name)
        if self.bias is None:
            return
        first = 0
        for region in self.regions(name):
            rows = slice(first, first + len(region.rows))
            source, total = f"{region.module}.bias", region.shape[:1]
            yield Shard(self.bias[rows], source, total, 0, region.rows.start)
            first = rows.stop


class GatedLinear(ColumnLinear):
    """A column layer of two parts, gate and up: the normed stream -> activation(gate) * up."""

    def __init__(
        self,
        in_features: int,
        parts: Sequence[Part],
        bias: bool,
        placement: Placement,
        *,
        activation: str = "silu",
    ) -> None:
        super().__init__(in_features, parts, bias, placement)
        self.activation = activation

    def forward(
        self, stream: nk.Stream, norm: nk.Norm | None, lora: nk.LoraPlan | None = None
    ) -> tuple[torch.Tensor, nk.Stream]:
        """Add what is pending to the stream, norm it if there is a norm, multiply, and gate.

        Returns:
            [T, F of this rank], and the stream after the addition.
        """
        if self.activation != "silu":
            product, stream = self.whole(stream, norm, lora)
            return nk.gelu_tanh_and_mul(product), stream
        weight = self.product(lora)
        if norm is None:
            stream = nk.add_pending(stream)
            return weight.gated_linear(stream.hidden, self.bias), stream
        return weight.norm_gated_linear(stream, norm, self.bias)


class RowLinear(Linear):
    """x [T, K of this rank] -> [T, N], summed over the ranks and added to the stream."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        placement: Placement,
        *,
        stays_pending: bool = False,
    ) -> None:
        """Make the layer.

        Args:
            in_features: K over all ranks.
            out_features: N.
            bias: whether it has one.
            placement: this rank's share.
            stays_pending: the product is never added at once, as a norm or a factor follows.
        """
        kept = placement.parallel.split(in_features, "the input features")
        super().__init__(out_features, len(kept), bias, placement)
        self.kept = kept
        self.in_features = in_features
        self.is_first = placement.parallel.rank == 0
        self.rank_sum = placement.rank_sum()
        self.stays_pending = stays_pending

    def forward(
        self, x: torch.Tensor, stream: nk.Stream, lora: nk.LoraPlan | None = None
    ) -> nk.Stream:
        """Multiply, and add to the stream: at once, or pending until the next norm."""
        bias = self.bias if self.is_first else None  # the sum over the ranks contains it once
        weight = self.product(lora)
        if self.stays_pending:
            return weight.linear_pending(x, stream, bias, self.rank_sum)
        return weight.linear_add(x, stream, bias, self.rank_sum)

    def regions(self, name: str) -> list[Region]:
        """This rank's columns."""
        rows = self.shape[0]
        return [Region(name, (rows, self.in_features), range(rows), self.kept)]

    def shards(self, name: str) -> Iterator[Shard]:
        """This rank's columns, and the whole bias."""
        yield from self.matrix_shards(name)
        if self.bias is not None:
            yield Shard(self.bias, f"{name}.bias", self.shape[:1])
