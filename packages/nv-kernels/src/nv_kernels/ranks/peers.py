"""Memory that the ranks of one machine write into each other, for sums that need no library.

Owns the records, and the rule of when such a sum serves. Never allocates the memory: whoever starts
the ranks does. Never computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EMPTY = -1
"""A word that nobody has written: two NaNs that no rounding makes (that gives 0x7FFF)."""
WRITTEN_NAN = 0x7FFF7FFF
"""What is written where the word would be EMPTY."""
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PeerBuffers:
    """A buffer of each rank, which all ranks can write.

    A rank writes its part of a sum into every other rank's buffer, at a place of its own, and reads
    the others' parts from its own buffer: a word that is no longer EMPTY has arrived, so there are
    no flags. Who has read a word makes it EMPTY again. A row's sums take turns between two slots. A
    rank writes a slot again only after it got everybody's part of the sum between, and that was
    sent after its receiver had emptied the slot. This holds row by row, so sums may differ in rows.

    Attributes:
        rank: this one.
        own: this rank's buffer, [2, size, max_rows, E / 2] int32: slot, whose part, row, and words
            of two 16-bit values (of columns i and i + E / 2). EMPTY at the start.
        addresses: [size] int64, where this rank's device finds everybody's, in order of rank.
        counts: [max_rows] int32, how many sums each row has taken part in; the device counts, so
            that a captured graph can be replayed.
        buffers: of all ranks as tensors, which only the definition in torch needs; empty where
            the others' are another process's.
    """

    EMPTY: ClassVar[int] = EMPTY

    rank: int
    own: torch.Tensor
    addresses: torch.Tensor
    counts: torch.Tensor
    buffers: tuple[torch.Tensor, ...] = field(default=(), repr=False)

    @classmethod
    def at(cls, rank: int, own: torch.Tensor, addresses: Sequence[int]) -> PeerBuffers:
        """Make the record of one rank, with nothing counted yet.

        Args:
            rank: this one.
            own: its buffer, empty.
            addresses: of all ranks' buffers, as its device finds them.
        """
        counts = torch.zeros(own.shape[2], dtype=torch.int32, device=own.device)
        return cls(rank, own, torch.tensor(addresses, dtype=torch.int64, device=own.device), counts)

    @classmethod
    def over(cls, rank: int, buffers: Sequence[torch.Tensor]) -> PeerBuffers:
        """As `at`, where this process has all ranks' buffers."""
        one = cls.at(rank, buffers[rank], [buffer.data_ptr() for buffer in buffers])
        return replace(one, buffers=tuple(buffers))

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.own.shape[1]

    @property
    def max_rows(self) -> int:
        """Rows that a sum has at once; those of longer ones take turns."""
        return self.counts.shape[0]

    @property
    def width(self) -> int:
        """E: columns of a sum."""
        return 2 * self.own.shape[3]

    def serve(self, x: torch.Tensor) -> bool:
        """True if a sum like x [T, E] can go through the buffers, and should.

        Every rank reads every part whole. Between two ranks no way moves less; between more, one
        that shares the parts out does, and many rows are left to it.
        """
        fits = self.size == 2 or x.shape[0] <= self.max_rows
        return fits and x.dtype in DTYPES and x.shape[1] == self.width


@dataclass(frozen=True)
class RankSum:
    """The sum of a tensor [T, E] over the ranks.

    Attributes:
        whole: sums any tensor and returns it.
        peers: where a short sum may be left to the norm that reads it, or None.
    """

    whole: Callable[[torch.Tensor], torch.Tensor]
    peers: PeerBuffers | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Sum now."""
        return self.whole(x)

    def peers_for(self, x: torch.Tensor) -> PeerBuffers | None:
        """Give the buffers, if the sum of a tensor like x may be left to the norm."""
        return self.peers if self.peers is not None and self.peers.serve(x) else None
