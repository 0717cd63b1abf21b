"""The router and the weights of a mixture of experts, shared out over tensor-parallel ranks.

Owns the names of their tensors. Every rank holds the whole router and a part of each expert's
width: gate and up are split as a column layer, down as a row layer. Never chooses a kernel:
`nk.Experts` does.
"""

from collections.abc import Iterator

import nv_kernels as nk
import torch
from torch import nn

from nv_models.config import Mixture
from nv_models.layers.linear import Linear
from nv_models.placement import Placement, Shard


class Router(Linear):
    """The normed stream [T, K] -> a logit for each expert [T, E], in the model's dtype."""

    def __init__(self, hidden_size: int, kind: Mixture, placement: Placement) -> None:
        super().__init__(kind.num_experts, hidden_size, False, placement)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] -> [T, E], the same on every rank."""
        return self.weight.linear(x)

    def shards(self, name: str) -> Iterator[Shard]:
        """The whole matrix."""
        source = f"{module_of(name, self.kind)}.gate.weight"
        yield Shard(self.values, source, tuple(self.values.shape))


class ExpertMLPs(nn.Module):
    """The gated MLPs of all experts.

    Attributes:
        gate_up: [E, 2F of this rank, K], which the loader fills.
        down: [E, K, F of this rank].
        experts: both and their products, made by `finish` once they are loaded.
    """

    experts: nk.Experts

    def __init__(self, hidden_size: int, kind: Mixture, placement: Placement) -> None:
        super().__init__()
        self.kind = kind
        self.kept = kind.split(placement.parallel)
        width = len(self.kept)
        self.gate_up = placement.empty(kind.num_experts, 2 * width, hidden_size)
        self.down = placement.empty(kind.num_experts, hidden_size, width)
        self.arithmetic = placement.arithmetic
        self.rank_sum = placement.rank_sum()

    def finish(self) -> None:
        """Lay the matrices out as the device multiplies fastest, in place where it can be."""
        self.experts = self.arithmetic.experts(
            nk.DenseExperts(self.gate_up.detach(), self.down.detach())
        )
        del self.gate_up, self.down

    def forward(self, x: torch.Tensor, logits: torch.Tensor, stream: nk.Stream) -> nk.Stream:
        """Add the weighted sum of each token's experts to the stream; it stays pending.

        Args:
            x: [T, K], the normed stream.
            logits: [T, E] of the router.
            stream: with nothing pending.
        """
        routing = self.experts.route(logits, self.kind.top_k, self.kind.is_normalised)
        return self.experts.linear_add(x, routing, stream, self.rank_sum)

    def shards(self, name: str) -> Iterator[Shard]:
        """Each expert's three matrices."""
        names, start = self.kind.names, self.kept.start
        size = self.down.shape[1]
        for expert in range(self.kind.num_experts):
            own = f"{module_of(name, self.kind)}.experts.{expert}"
            gate, up = self.gate_up[expert].chunk(2)
            yield Shard(gate, f"{own}.{names.gate}.weight", (self.kind.width, size), 0, start)
            yield Shard(up, f"{own}.{names.up}.weight", (self.kind.width, size), 0, start)
            down = f"{own}.{names.down}.weight"
            yield Shard(self.down[expert], down, (size, self.kind.width), 1, start)


def module_of(name: str, kind: Mixture) -> str:
    """The checkpoint's name of the module that holds router and experts.

    Args:
        name: of one of our modules in it: `model.layers.3.mlp.gate`.
        kind: has the name that the checkpoint gives it.
    """
    layer = name.rsplit(".", 2)[0]
    return f"{layer}.{kind.names.module}"
