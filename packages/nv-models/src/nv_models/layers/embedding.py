"""The vocabulary's two ends: token ids to hidden states, and hidden states to logits.

Owns the rows of this rank's part of the vocabulary, padded with zeros to equal parts. Never
samples.
"""

from collections.abc import Iterator

import nv_kernels as nk
import torch
from torch import nn

from nv_models.config import ModelConfig
from nv_models.placement import Placement
from nv_models.quantization.form import Region
from nv_models.quantization.matrix import LoadedMatrix, allocated
from nv_models.shard import Shard


class Vocabulary(nn.Module):
    """One row of E numbers per token id.

    Attributes:
        weight: [V of this rank, E], made by `allocate` and filled by the loader.
    """

    weight: nn.Parameter

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.placement = placement
        self.parallel = placement.parallel
        self.rank_sum = placement.rank_sum()
        self.kept = self.parallel.split_vocabulary(vocab_size)

    def allocate(self, name: str) -> None:
        """Make the rows, zeros as long as nothing is loaded."""
        del name  # a table of floats is made alike in every module
        rows = self.parallel.vocabulary_rows(self.vocab_size)
        self.weight = self.placement.zeros(rows, self.hidden_size)  # [V of this rank, E]

    def shards(self, name: str) -> Iterator[Shard]:
        """The rows of real tokens."""
        target, shape = self.weight[: len(self.kept)], (self.vocab_size, self.hidden_size)
        yield Shard(target, f"{name}.weight", shape, 0, self.kept.start)


class Embedding(Vocabulary):
    """Token ids to the residual stream, times a factor that is rounded to the model's dtype."""

    def __init__(
        self, vocab_size: int, hidden_size: int, placement: Placement, *, factor: float = 1.0
    ) -> None:
        super().__init__(vocab_size, hidden_size, placement)
        self.factor = float(torch.tensor(factor, dtype=placement.dtype, device="cpu"))

    def forward(self, token_ids: torch.Tensor) -> nk.Stream:
        """Ids [T] -> the start of the residual stream [T, E].

        A rank contributes zeros for the ids of others, and the sum may be left to the first norm.
        """
        if self.rank_sum is None:
            return nk.Stream(self._scaled(nk.embedding(token_ids, self.weight)))
        rows = token_ids - self.kept.start  # [T]
        own = (rows >= 0) & (rows < len(self.kept))
        x = self._scaled(nk.embedding(torch.where(own, rows, 0), self.weight) * own[:, None])
        peers = self.rank_sum.peers_for(x)
        if peers is None:
            return nk.Stream(self.rank_sum(x))
        return nk.Stream(torch.zeros_like(x), x, peers)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.factor == 1 else x * self.factor


class Head(Vocabulary):
    """Hidden states to logits.

    Attributes:
        matrix: the tensors of quantized rows, in place of `weight`; None: the rows are floats.
        head: the rows and their product, made by `finish` once they are loaded.
    """

    head: nk.Weight

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        super().__init__(vocab_size, hidden_size, placement)
        self.matrix: LoadedMatrix | None = None

    def allocate(self, name: str) -> None:
        """Make the tensors that the loader fills."""
        placement, columns = self.placement, range(self.hidden_size)
        region = Region(name, (self.vocab_size, self.hidden_size), self.kept, columns)
        self.matrix = allocated(
            [region], [None], placement.scheme, placement.dtype, placement.device
        )
        if self.matrix is None:
            super().allocate(name)

    def shards(self, name: str) -> Iterator[Shard]:
        """The rows of real tokens."""
        return super().shards(name) if self.matrix is None else self.matrix.shards()

    def finish(self) -> None:
        """Lay the rows out as the device multiplies fastest; the loaded ones are released."""
        arithmetic = self.placement.arithmetic
        if self.matrix is not None:
            self.head = self.matrix.weight(arithmetic.quantized, arithmetic.head)
            self.matrix = None
        else:
            self.head = arithmetic.head(self.weight.detach())
            del self.weight

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [R, E] -> logits [R, V] fp32 on every rank, without the padding."""
        own = self.head.logits(hidden)
        rows = self.parallel.vocabulary_rows(self.vocab_size)
        if own.shape[1] < rows:  # quantized rows have no padding
            own = nn.functional.pad(own, (0, rows - own.shape[1]))
        logits = self.parallel.all_gather_last(own)
        return logits[:, : self.vocab_size].contiguous()


class TiedEmbedding(Embedding, Head):
    """Both ends by one table, in floats."""

    def allocate(self, name: str) -> None:
        """Make the rows, zeros as long as nothing is loaded."""
        Vocabulary.allocate(self, name)

    def finish(self) -> None:
        """Lay the rows out for the head's product; the embedding reads the loaded ones."""
        self.head = self.placement.arithmetic.head(self.weight.detach())


def vocabulary_ends(config: ModelConfig, placement: Placement) -> tuple[Embedding, Head | None]:
    """A model's embedding, and its head if it has one: they may be one table."""
    sizes = config.vocab_size, config.hidden_size
    factor = config.factors.embedding
    if not config.has_head:
        return Embedding(*sizes, placement, factor=factor), None
    if config.tie_word_embeddings:
        both = TiedEmbedding(*sizes, placement, factor=factor)
        return both, both
    return Embedding(*sizes, placement, factor=factor), Head(*sizes, placement)
