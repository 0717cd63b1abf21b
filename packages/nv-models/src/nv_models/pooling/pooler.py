"""Pooler: hidden states to embeddings or class values, in fp32 whatever the model's dtype.

Owns the head's weights, whole on every rank, for they are small. Never chooses which states of a
prompt it gets: the engine's head does, by `config.pooling`.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from nv_models.placement import Placement
from nv_models.pooling.pooler_config import Activation, DenseLayer, PoolerConfig
from nv_models.shard import Shard

DENSE = "dense.{}"
"""The name under which a Dense layer's weights are looked for, by its number."""


class DenseModule(nn.Module):
    """activation(W x + b)."""

    def __init__(self, layer: DenseLayer, source: str, placement: Placement) -> None:
        super().__init__()
        self.source = source
        empty = partial(placement.empty, dtype=torch.float32)
        self.weight = empty(layer.out_features, layer.in_features)
        self.bias = empty(layer.out_features) if layer.has_bias else None
        self.activation: nn.Module = getattr(nn, layer.activation)()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[R, in_features] -> [R, out_features]."""
        result: torch.Tensor = self.activation(nn.functional.linear(x, self.weight, self.bias))
        return result

    def shards(self, name: str) -> Iterator[Shard]:
        """Both, whole."""
        del name  # it lies in a folder of its own
        yield Shard(self.weight, f"{self.source}.linear.weight", tuple(self.weight.shape))
        if self.bias is not None:
            yield Shard(self.bias, f"{self.source}.linear.bias", tuple(self.bias.shape))


class Score(nn.Module):
    """A classifier: W x + b."""

    def __init__(self, config: PoolerConfig, placement: Placement) -> None:
        super().__init__()
        self.config = config
        rows = len(config.label_tokens) or config.num_labels
        empty = partial(placement.empty, dtype=torch.float32)
        self.weight = empty(rows, config.hidden_size)
        self.bias = empty(config.num_labels) if config.has_bias else None
        self.adapters: torch.Tensor | None = None  # [S, labels, E + 1] of an `AdapterPool`

    def forward(self, x: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """[R, E] -> [R, labels]; `adapters` [R]: the slots of rows' adapters, -1: none."""
        values = nn.functional.linear(x, self.weight, self.bias)
        if adapters is None or self.adapters is None:
            return values
        for slot, more in enumerate(self.adapters):
            own = values + nn.functional.linear(x, more[:, :-1], more[:, -1])
            values = torch.where((adapters == slot)[:, None], own, values)
        return values

    def shards(self, name: str) -> Iterator[Shard]:
        """`score` of the checkpoint, or the rows of two tokens of its head."""
        del name  # the checkpoint's name is `score`, whatever holds this
        size = self.config.hidden_size
        for row, token in enumerate(self.config.label_tokens):
            shape = (self.config.vocab_size, size)
            yield Shard(self.weight[row : row + 1], self.config.label_source, shape, 0, token)
        if not self.config.label_tokens:
            yield Shard(self.weight, "score.weight", tuple(self.weight.shape))
        if self.bias is not None:
            yield Shard(self.bias, "score.bias", tuple(self.bias.shape))

    def finish(self) -> None:
        """Make one label of two tokens: a softmax over both is a sigmoid of their difference."""
        if self.config.is_two_way:
            no, yes = self.weight.detach()
            self.weight = nn.Parameter((yes - no)[None], requires_grad=False)


class Pooler(nn.Module):
    """States to results.

    Attributes:
        config: which.
    """

    def __init__(self, config: PoolerConfig, placement: Placement) -> None:
        super().__init__()
        self.config = config
        self.steps: nn.Module
        if config.kind == "classify":
            self.steps = Score(config, placement)
        else:
            named = enumerate(config.dense)
            dense = (DenseModule(layer, DENSE.format(index), placement) for index, layer in named)
            self.steps = nn.Sequential(*dense)

    def forward(self, states: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """States [R, E] -> values [R, width] fp32, before the activation.

        Args:
            states: of prompts or tokens.
            adapters: [R], the slots of their adapters, -1: none; None: none changes the classifier.
        """
        if isinstance(self.steps, Score):
            scored: torch.Tensor = self.steps(states.float(), adapters)
            return scored
        values: torch.Tensor = self.steps(states.float())
        return values

    def activate(self, values: torch.Tensor) -> torch.Tensor:
        """Values [R, width] -> embeddings of length 1, or probabilities; of a regression: as is."""
        match self.config.activation:
            case Activation.NORMALIZE:
                return nn.functional.normalize(values, dim=-1)
            case Activation.SOFTMAX:
                return values.softmax(-1)
            case Activation.SIGMOID:
                return values.sigmoid()
            case Activation.NONE:
                return values
