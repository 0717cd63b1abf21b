"""The vocabulary's two ends: token ids to hidden states, and hidden states to logits.

Owns the rows of this rank's part of the vocabulary, padded with zeros to equal parts. Never
samples.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import nv_kernels as nk
import torch
from torch import nn

from nv_models.config import ModelConfig
from nv_models.layers.layer import Layer
from nv_models.placement import Placement
from nv_models.quantization.form import Form, Region
from nv_models.quantization.matrix import LoadedMatrix, of_forms
from nv_models.quantization.scheme import Scheme
from nv_models.shard import Shard


class Vocabulary(Layer, ABC):
    """One row of E numbers per token id.

    Attributes:
        weight: [V of this rank, E], made by `allocate` and filled by the loader.
        matrix: the tensors of quantized rows, in place of `weight`; None: the rows are floats.
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
        self.matrix: LoadedMatrix | None = None

    @abstractmethod
    def form(self, scheme: Scheme, region: Region) -> Form | None:
        """How the files keep the rows of a quantized checkpoint; None: as floats."""

    def allocate(self, name: str) -> None:
        """Make the rows; of floats, zeros as long as nothing is loaded."""
        placement, sizes = self.placement, (self.vocab_size, self.hidden_size)
        region = Region(name, sizes, self.kept, range(self.hidden_size))
        scheme = placement.scheme
        form = self.form(scheme, region) if scheme else None
        if scheme is None or form is None:
            rows = self.parallel.vocabulary_rows(self.vocab_size)
            self.weight = placement.zeros(rows, self.hidden_size)  # [V of this rank, E]
            return
        self.matrix = of_forms([(region, None)], [form], scheme, placement.dtype, placement.device)

    def shards(self, name: str) -> Iterator[Shard]:
        """The rows of real tokens."""
        if self.matrix is not None:
            yield from self.matrix.shards()
            return
        target, shape = self.weight[: len(self.kept)], (self.vocab_size, self.hidden_size)
        yield Shard(target, f"{name}.weight", shape, 0, self.kept.start)


class Embedding(Vocabulary):
    """Token ids to the residual stream, times a factor that is rounded to the model's dtype."""

    def __init__(
        self, vocab_size: int, hidden_size: int, placement: Placement, *, factor: float = 1.0
    ) -> None:
        super().__init__(vocab_size, hidden_size, placement)
        self.factor = float(torch.tensor(factor, dtype=placement.dtype, device="cpu"))
        self.blocks: nk.Blocks | None = None
        self.embedding_lora: nk.LoraWeights | None = None  # its `a` has a row for each token

    def form(self, scheme: Scheme, region: Region) -> Form | None:
        """See `Vocabulary.form`."""
        return scheme.embedding_form(region)

    def finish(self) -> None:
        """Keep the rows as blocks, if the file has them so."""
        if self.matrix is not None:
            self.blocks = self.matrix.blocks()
            self.matrix = None

    def forward(self, token_ids: torch.Tensor, lora: nk.LoraPlan | None = None) -> nk.Stream:
        """Ids [T] -> the start of the residual stream [T, E].

        A rank contributes zeros for the ids of others, and the sum may be left to the first norm.

        Args:
            token_ids: [T].
            lora: the adapters of the tokens; None: none changes the embedding.
        """
        if self.rank_sum is None:
            x = self._scaled(self._rows(token_ids))
            return nk.Stream(x if lora is None else self._adapted(x, token_ids, lora))
        rows = token_ids - self.kept.start  # [T]
        own = (rows >= 0) & (rows < len(self.kept))
        index = torch.where(own, rows, 0)
        x = self._scaled(self._rows(index) * own[:, None])
        if lora is not None:
            x = self._adapted(x, index, lora, own)
        peers = self.rank_sum.peers_for(x)
        if peers is None:
            return nk.Stream(self.rank_sum(x))
        return nk.Stream(torch.zeros_like(x), x, peers)

    def _rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows [T] of this rank's part -> [T, E]."""
        if self.blocks is None:
            return nk.embedding(index, self.weight)
        (rows,) = self.blocks.parts
        return nk.Blocks((rows[index],), self.blocks.kind).dense(self.placement.dtype)

    def _adapted(
        self,
        x: torch.Tensor,
        index: torch.Tensor,
        lora: nk.LoraPlan,
        own: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add what the adapters give for rows [T] of this rank's part; zeros for others' ids."""
        if self.embedding_lora is None:
            return x
        a, b, part_rows = self.embedding_lora
        hidden = a[lora.adapters.clamp(min=0).long(), index].float()  # [T, R]
        if own is not None:
            hidden = hidden * own[:, None]
        return nk.lora_expand(x.contiguous(), hidden[None], b, part_rows, lora)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.factor == 1 else x * self.factor


class Head(Vocabulary):
    """Hidden states to logits.

    Attributes:
        head: the rows and their product, made by `finish` once they are loaded.
        head_lora: adapters beside it, made by an `AdapterPool`; None: it has none.
    """

    head: nk.Weight
    head_lora: nk.LoraWeights | None = None

    def form(self, scheme: Scheme, region: Region) -> Form | None:
        """See `Vocabulary.form`."""
        return scheme.form(region)

    def finish(self) -> None:
        """Lay the rows out as the device multiplies fastest; the loaded ones are released."""
        arithmetic = self.placement.arithmetic
        if self.matrix is not None:
            self.head = self.matrix.weight(arithmetic.quantized, arithmetic.head)
            self.matrix = None
        else:
            self.head = arithmetic.head(self.weight.detach())
            del self.weight

    def logits(self, hidden: torch.Tensor, lora: nk.LoraPlan | None = None) -> torch.Tensor:
        """Hidden states [R, E] -> logits [R, V] fp32 on every rank, without the padding."""
        own = self.head.logits(hidden)
        rows = self.parallel.vocabulary_rows(self.vocab_size)
        if own.shape[1] < rows:  # quantized rows have no padding
            own = nn.functional.pad(own, (0, rows - own.shape[1]))
        if lora is not None and self.head_lora is not None:
            a, b, part_rows = self.head_lora
            shrunk = nk.lora_shrink(hidden, a, lora)
            own = nk.lora_expand(own.contiguous(), shrunk, b, part_rows, lora)
        logits = self.parallel.all_gather_last(own)
        return logits[:, : self.vocab_size].contiguous()


class TiedEmbedding(Embedding, Head):
    """Both ends by one table."""

    def finish(self) -> None:
        """Lay the rows out for the head's product; the embedding reads the loaded ones."""
        Embedding.finish(self)
        arithmetic = self.placement.arithmetic
        if self.blocks is None:
            self.head = arithmetic.head(self.weight.detach())
        else:
            self.head = arithmetic.quantized(self.blocks)


def vocabulary_ends(config: ModelConfig, placement: Placement) -> tuple[Embedding, Head | None]:
    """A model's embedding, and its head if it has one: they may be one table."""
    sizes = config.vocab_size, config.embedding_size or config.hidden_size
    factor = config.factors.embedding
    if not config.has_head:
        return Embedding(*sizes, placement, factor=factor), None
    if config.tie_word_embeddings:
        both = TiedEmbedding(*sizes, placement, factor=factor)
        return both, both
    return Embedding(*sizes, placement, factor=factor), Head(*sizes, placement)
