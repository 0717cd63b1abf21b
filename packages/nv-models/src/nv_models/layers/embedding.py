"""The vocabulary's two ends: token ids to hidden states, hidden states to logits.

Owns: the rows of this rank's part of the vocabulary, padded with zeros to equal parts.
Never: samples.
"""

from collections.abc import Iterator

import nv_kernels as nk
import torch
from torch import nn

from nv_models.placement import Placement, Shard


class Vocabulary(nn.Module):
    """One row of E numbers a token id. A tied model uses one table at both ends."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.parallel = placement.parallel
        self.reduce = self.parallel.layer_sum(placement.batch_invariant)
        self.head = nk.batch_invariant_logits if placement.batch_invariant else nk.logits
        self.kept = self.parallel.split_vocabulary(vocab_size)
        rows = self.parallel.vocabulary_rows(vocab_size)
        self.weight = placement.zeros(rows, hidden_size)  # [V of this rank, E]
        self.head_weight: torch.Tensor | None = None  # the same, packed for the head's product

    def forward(self, token_ids: torch.Tensor) -> nk.Stream:
        """Ids [T] -> the start of the residual stream [T, E].

        A rank contributes zeros for the ids of others, and the sum may be left to the first norm.
        """
        if self.reduce is None:
            return nk.Stream(nk.embedding(token_ids, self.weight))
        rows = token_ids - self.kept.start  # [T]
        own = (rows >= 0) & (rows < len(self.kept))
        x = nk.embedding(torch.where(own, rows, 0), self.weight) * own[:, None]
        peers = self.reduce.peers_for(x)
        return (
            nk.Stream(self.reduce(x)) if peers is None else nk.Stream(torch.zeros_like(x), x, peers)
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [R, E] -> logits [R, V] on every rank, without the padding; `nk.logits`."""
        weight = self.weight if self.head_weight is None else self.head_weight
        logits = self.parallel.all_gather_last(self.head(hidden, weight))
        return logits[:, : self.vocab_size].contiguous()

    def shards(self, name: str) -> Iterator[Shard]:
        """The rows of real tokens."""
        target, shape = self.weight[: len(self.kept)], (self.vocab_size, self.weight.shape[1])
        yield Shard(target, f"{name}.weight", shape, 0, self.kept.start)
