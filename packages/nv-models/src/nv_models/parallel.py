"""The part of each weight that a rank holds, and the collectives that join the parts.

Owns the arithmetic of splitting heads, features and vocabulary over ranks, and the collectives.
Never creates a process group: the engine does, and passes it as an argument.
"""

from dataclasses import dataclass, field

import nv_kernels as nk
import torch
import torch.distributed as dist

VOCABULARY_MULTIPLE = 8  # of a rank's rows: a row of bf16 logits is whole 16 bytes


@dataclass(frozen=True)
class TensorParallel:
    """One rank's place among the ranks that hold a model together.

    Args:
        rank: this process, 0 <= rank < size.
        size: how many processes share the model; with 1 every collective returns its input.
        group: the process group; None is the default group.
        peers: memory that the ranks write into each other, for a layer's sums; None where there is
            none, and every sum goes through the group.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    peers: nk.PeerBuffers | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"rank is {self.rank}: it must be at least 0 and below size, {self.size}"
            )

    def split(self, total: int, what: str) -> range:
        """This rank's share of `total` equal things.

        Raises:
            ValueError: the ranks do not divide `total`; the message names `what`.
        """
        if total % self.size:
            fitting = [size for size in range(1, total + 1) if total % size == 0 and size <= 8]
            raise ValueError(
                f"tensor_parallel_size {self.size} does not divide {what} = {total}; "
                f"use one of {fitting}"
            )
        share = total // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def split_kv_heads(self, num_kv_heads: int) -> range:
        """This rank's KV heads; where there are fewer heads than ranks, a head has several holders.

        Raises:
            ValueError: neither number divides the other.
        """
        if self.size <= num_kv_heads:
            return self.split(num_kv_heads, "num_key_value_heads")
        if self.size % num_kv_heads:
            raise ValueError(
                f"tensor_parallel_size {self.size} is not a multiple of "
                f"num_key_value_heads = {num_kv_heads}, so KV heads cannot be replicated evenly"
            )
        head = self.rank * num_kv_heads // self.size
        return range(head, head + 1)

    def vocabulary_rows(self, vocab_size: int) -> int:
        """Rows of the embedding that each rank holds, padding included."""
        if self.size == 1:
            return vocab_size
        multiple = self.size * VOCABULARY_MULTIPLE
        return -(-vocab_size // multiple) * VOCABULARY_MULTIPLE

    def split_vocabulary(self, vocab_size: int) -> range:
        """The token ids whose rows this rank holds; may be fewer than `vocabulary_rows`."""
        rows = self.vocabulary_rows(vocab_size)
        start = min(self.rank * rows, vocab_size)
        return range(start, min(start + rows, vocab_size))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; returns x."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def sum_in_order(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place and in fp32, in order of rank; returns x.

        `all_reduce` may add in an order that depends on an element's place.
        """
        if self.size > 1:
            parts = x.new_empty((self.size, *x.shape))
            dist.all_gather_into_tensor(parts.view(-1), x.contiguous().view(-1), group=self.group)
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part
            x.copy_(total)
        return x

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N] on each rank -> [..., size * N] on every rank, in order of rank."""
        if self.size == 1:
            return x
        parts = x.new_empty((self.size, *x.shape))
        dist.all_gather_into_tensor(parts.view(-1), x.contiguous().view(-1), group=self.group)
        return torch.cat(parts.unbind(), -1)
