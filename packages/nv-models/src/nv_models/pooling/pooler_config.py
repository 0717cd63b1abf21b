"""PoolerConfig: which states of a prompt are taken, and what is made of them.

Owns the record, and the length that it leaves a text. Never reads a file: `read_pooler` does.
"""

from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from nv_models.config import ModelConfig


class Pooling(Enum):
    """The states that a prompt's own result is made of."""

    LAST = "lasttoken"
    MEAN = "mean"
    CLS = "cls"
    """The first token's."""


class Activation(Enum):
    """The last function of a result, where it is wanted."""

    NORMALIZE = "normalize"
    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    NONE = "none"


@dataclass(frozen=True)
class DenseLayer:
    """A `Dense` module of sentence-transformers: activation(W x + b).

    Args:
        folder: where its weights are.
        in_features: width of x.
        out_features: width of the result.
        has_bias: whether there is a b.
        activation: the name of a class of torch.nn, such as "Tanh".
    """

    folder: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: str


@dataclass(frozen=True)
class PoolerConfig:
    """How hidden states [E] become a result.

    Args:
        kind: "embed" or "classify".
        hidden_size: E.
        pooling: which states of a prompt count.
        activation: what the result ends in.
        activates: whether it does so for a request that leaves it open.
        tasks: what the model can do, in vLLM's names.
        labels: the names of a classifier's labels, in order; () of an embedding model.
        has_bias: whether a classifier's `score` has a bias.
        label_tokens: tokens whose rows of a head for tokens are a classifier's weights. (): the
            checkpoint has `score.weight`.
        is_two_way: whether two such tokens, as "no" and "yes", are one label: its weight is the
            second's row minus the first's.
        label_source: the tensor with those rows.
        vocab_size: rows of that tensor.
        dense: of an embedding model, in order.
        prompts: texts that go in front of a text, by name.
        default_prompt: the name of the one that goes in front if none is named.
        pools_prompt: whether the tokens of such a prompt count in the result; the last token's
            state counts either way.
        max_length: the most tokens of a text, where the files set a bound of their own.
        length_place: which field of which file sets it, in errors.
    """

    kind: str
    hidden_size: int
    pooling: Pooling
    activation: Activation
    activates: bool
    tasks: tuple[str, ...]
    labels: tuple[str, ...] = ()
    has_bias: bool = False
    label_tokens: tuple[int, ...] = ()
    is_two_way: bool = False
    label_source: str = ""
    vocab_size: int = 0
    dense: tuple[DenseLayer, ...] = ()
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    pools_prompt: bool = True
    max_length: int | None = None
    length_place: str = ""

    @property
    def num_labels(self) -> int:
        """Of a classifier; 0 of an embedding model."""
        return len(self.labels)

    @property
    def width(self) -> int:
        """Values of a result."""
        if self.kind == "classify":
            return self.num_labels
        return self.dense[-1].out_features if self.dense else self.hidden_size

    @property
    def joins_pairs(self) -> bool:
        """Whether the two texts of a pair become one text, without a token between them."""
        return bool(self.label_tokens)

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether a prompt's result needs other states than the last token's."""
        return self.pooling is not Pooling.LAST


def bounded(config: ModelConfig, pooler: PoolerConfig | None) -> ModelConfig:
    """The config with the pooler's own length, where that is the shorter one."""
    bound = pooler.max_length if pooler else None
    if pooler is None or bound is None or bound >= config.max_length:
        return config
    return replace(config, max_length=bound, length_place=pooler.length_place)
