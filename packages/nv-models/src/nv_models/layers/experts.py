"""The router and the weights of a mixture of experts, shared out over tensor-parallel ranks.

Owns the names of their tensors. Every rank holds the whole router and a part of each expert's
width: gate and up are split as a column layer, down as a row layer. Quantized matrices stay so, or
are dequantized a matrix at a time if not all of a layer can. Never chooses a kernel: `nk.Experts`
does.
"""

from collections.abc import Iterator

import nv_kernels as nk
import torch
from torch import nn

from nv_models.config import Mixture
from nv_models.layers.layer import Layer
from nv_models.layers.linear import Linear
from nv_models.layers.norm import RMSNorm
from nv_models.placement import Placement
from nv_models.quantization.experts import LoadedExperts, allocated_experts
from nv_models.quantization.form import Region
from nv_models.quantization.matrix import LoadedMatrix, allocated
from nv_models.quantization.scheme import Dequantized
from nv_models.shard import Shard

REASON = "not all experts of the layer stay quantized in one kind of form without an order"


class Router(Linear):
    """The matrix that scores the experts, whole on every rank, and how they are chosen.

    It is a `nk.Scorer`.
    """

    def __init__(self, hidden_size: int, kind: Mixture, placement: Placement) -> None:
        super().__init__(kind.num_experts, hidden_size, kind.bias, placement)
        self.kind = kind

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.kind.top_k

    @property
    def is_normalised(self) -> bool:
        """Whether the chosen probabilities are divided by their sum."""
        return self.kind.is_normalised

    def regions(self, name: str) -> list[Region]:
        """The whole matrix."""
        rows, columns = self.shape
        source = f"{module_of(name, self.kind)}.{self.kind.names.router}"
        return [Region(source, self.shape, range(rows), range(columns))]

    def shards(self, name: str) -> Iterator[Shard]:
        """The whole matrix, and the whole bias."""
        yield from self.matrix_shards(name)
        if self.bias is not None:
            (region,) = self.regions(name)
            yield Shard(self.bias, f"{region.module}.bias", self.shape[:1])


class ExpertMLPs(Layer):
    """The gated MLPs of all experts.

    Attributes:
        loaded: the matrices, where all of them stay quantized, made by `allocate`; else None.
        gate_up: the others, [E, 2F of this rank, K], made by `allocate` and filled by the loader.
        down: [E, K, F of this rank].
        gate_up_bias: [E, 2F of this rank] or None.
        down_bias: [E, K] or None.
        packed: the matrices that the files have quantized and that do not stay so, by their
            modules, with the places of their values in the stacks; `finish` dequantizes them.
        experts: all of them and their products, made by `finish` once they are loaded.
    """

    gate_up: nn.Parameter
    down: nn.Parameter
    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None
    packed: dict[str, tuple[LoadedMatrix, torch.Tensor]]
    experts: nk.Experts

    def __init__(self, hidden_size: int, kind: Mixture, placement: Placement) -> None:
        super().__init__()
        self.kind = kind
        self.kept = kind.split(placement.parallel)
        self.hidden_size = hidden_size
        self.placement = placement
        self.rank_sum = placement.rank_sum()
        self.loaded: LoadedExperts | None = None

    def allocate(self, name: str) -> None:
        """Make the tensors that the loader fills.

        Raises:
            NotImplementedError: the experts are quantized in a way that is not read.
        """
        self._refuse_stacked(name)
        count, size, width = self.kind.num_experts, self.hidden_size, len(self.kept)
        empty, has_bias = self.placement.empty, self.kind.bias
        self.gate_up_bias = empty(count, 2 * width) if has_bias else None
        self.down_bias = empty(count, size) if has_bias else None
        self.packed = {}
        scheme = None if self.kind.names.is_stacked else self.placement.scheme
        dtype, device = self.placement.dtype, self.placement.device
        if scheme is not None:
            self.loaded = allocated_experts(self._regions(name), scheme, device)
        if self.loaded is not None:
            return
        self.gate_up = empty(count, 2 * width, size)
        self.down = empty(count, size, width)
        if scheme is None:
            return
        for region, values in self._matrices(name):
            if matrix := allocated([(region, None)], scheme, dtype, device):
                self.packed[region.module] = matrix, values
        if self.packed:
            sizes = sum(values.nbytes for _, values in self.packed.values())
            module = f"{module_of(name, self.kind)}.experts"
            scheme.note(Dequantized((module,), sizes, REASON))

    def _refuse_stacked(self, name: str) -> None:
        """Refuse stacks of codes."""
        scheme, module = self.placement.scheme, module_of(name, self.kind)
        shape = self.hidden_size, self.kind.width
        own = f"{module}.experts.0.{self.kind.names.down}"
        if scheme is None or not self.kind.names.is_stacked:
            return
        if scheme.form(Region(own, shape, range(shape[0]), self.kept)):
            raise NotImplementedError(
                f"{module}.experts are quantized ({scheme.name}), which is not built: use the "
                "checkpoint in floats without quantization=, or a GGUF file, whose experts are "
                "dequantized"
            )

    def fill_dummy(self, generator: torch.Generator) -> None:
        """Fill the tensors of quantized matrices at random."""
        if self.loaded is not None:
            self.loaded.fill_dummy(generator)
        for matrix, _ in self.packed.values():
            matrix.fill_dummy(generator)

    def finish(self) -> None:
        """Lay the matrices out as the device multiplies fastest, in place where it can be."""
        is_first = self.placement.parallel.rank == 0
        biases = (
            self.gate_up_bias,
            self.down_bias if is_first else None,
        )  # the ranks' sum has it once
        placement, gate = self.placement, self.kind.gate
        if self.loaded is not None:
            kind = placement.arithmetic
            self.experts = self.loaded.experts(kind, placement.dtype, *biases, gate)
            self.loaded = None
            return
        while self.packed:
            _, (matrix, values) = self.packed.popitem()
            values.copy_(matrix.dequantized())
        if self.kind.names.is_stacked:
            separate(self.gate_up)
            if self.gate_up_bias is not None:
                separate(self.gate_up_bias)
        self.experts = placement.arithmetic.experts(
            nk.DenseExperts(self.gate_up.detach(), self.down.detach(), *biases, gate)
        )
        del self.gate_up, self.down

    def forward(self, stream: nk.Stream, norm: RMSNorm, router: Router) -> nk.Stream:
        """Add the weighted sum of each token's experts to the stream; it may stay pending.

        Args:
            stream: the residual [T, K].
            norm: norm of the residual.
            router: reads the normed stream.
        """
        return self.experts.norm_add(stream, norm, router, self.rank_sum)

    def shards(self, name: str) -> Iterator[Shard]:
        """Each expert's three matrices and their biases, or the stacks of all."""
        if self.kind.names.is_stacked:
            yield from self._stacks(f"{module_of(name, self.kind)}.experts")
            return
        if self.loaded is not None:
            yield from self.loaded.shards()
        else:
            for region, values in self._matrices(name):
                packed = self.packed.get(region.module)
                yield from [region.shard(values)] if packed is None else packed[0].shards()
        if self.gate_up_bias is not None and self.down_bias is not None:
            yield from self._biases(name, self.gate_up_bias, self.down_bias)

    def _regions(self, name: str) -> dict[str, list[Region]]:
        """This rank's regions of each expert's matrices, by the fields of `nk.QuantizedExperts`."""
        names, size, width = self.kind.names, self.hidden_size, self.kind.width
        module, whole = f"{module_of(name, self.kind)}.experts", range(size)
        found: dict[str, list[Region]] = {"gates": [], "ups": [], "downs": []}
        for expert in range(self.kind.num_experts):
            own, inner, outer = f"{module}.{expert}", (width, size), (size, width)
            found["gates"].append(Region(f"{own}.{names.gate}", inner, self.kept, whole))
            found["ups"].append(Region(f"{own}.{names.up}", inner, self.kept, whole))
            found["downs"].append(Region(f"{own}.{names.down}", outer, whole, self.kept))
        return found

    def _matrices(self, name: str) -> Iterator[tuple[Region, torch.Tensor]]:
        """Each expert's three matrices: the region that this rank has, and its place."""
        regions = zip(*self._regions(name).values(), strict=True)
        for (gate, up, down), gate_up, values in zip(regions, self.gate_up, self.down, strict=True):
            yield from zip((gate, up), gate_up.chunk(2), strict=True)
            yield down, values

    def _biases(
        self, name: str, gate_up_bias: torch.Tensor, down_bias: torch.Tensor
    ) -> Iterator[Shard]:
        """Each expert's three biases."""
        names, size, width = self.kind.names, self.hidden_size, self.kind.width
        for expert in range(self.kind.num_experts):
            own = f"{module_of(name, self.kind)}.experts.{expert}"
            gate, up = gate_up_bias[expert].chunk(2)
            yield Shard(gate, f"{own}.{names.gate}.bias", (width,), 0, self.kept.start)
            yield Shard(up, f"{own}.{names.up}.bias", (width,), 0, self.kept.start)
            yield Shard(down_bias[expert], f"{own}.{names.down}.bias", (size,))

    def _stacks(self, module: str) -> Iterator[Shard]:
        """The stacks of all experts' matrices, and of their biases."""
        count, size, _ = self.down.shape
        width, start = self.kind.width, self.kept.start
        gate_up, down = self.gate_up.transpose(1, 2), self.down.transpose(1, 2)
        yield Shard(gate_up, f"{module}.gate_up_proj", (count, size, 2 * width), 2, 2 * start)
        yield Shard(down, f"{module}.down_proj", (count, width, size), 1, start)
        if self.gate_up_bias is not None and self.down_bias is not None:
            source = f"{module}.gate_up_proj_bias"
            yield Shard(self.gate_up_bias, source, (count, 2 * width), 1, 2 * start)
            yield Shard(self.down_bias, f"{module}.down_proj_bias", (count, size))


def separate(stack: torch.Tensor) -> None:
    """Put each expert's rows of gate, which alternate with those of up, before them."""
    for rows in stack:  # a second copy of one expert at a time
        rows.copy_(torch.cat((rows[::2], rows[1::2])))


def module_of(name: str, kind: Mixture) -> str:
    """The checkpoint's name of the module that holds router and experts.

    Args:
        name: of one of our modules in it: `model.layers.3.mlp.gate`.
        kind: has the name that the checkpoint gives it.
    """
    layer = name.rsplit(".", 2)[0]
    return f"{layer}.{kind.names.module}"
