"""Buffers of the ranks of one machine that all ranks can write, for sums without a library.

Owns the records, and the rule when such a sum is used. The code that starts the ranks allocates the
memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EMPTY = -1
"""A word that is not written yet: two NaNs that rounding never gives (it gives 0x7FFF)."""
WRITTEN_NAN = 0x7FFF7FFF
"""Written in place of a word that equals EMPTY."""
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PeerBuffers:
    """A buffer of each rank, which all ranks can write.

    A rank writes its part of a sum into every other rank's buffer, at a place of its own, and reads
    the others' parts from its own buffer. A word that is not EMPTY has arrived, so flags are not
    needed. The reader of a word makes it EMPTY again. The sums of a row alternate between the two
    halves of the buffer. A rank writes a half again only after it has received all parts of the sum
    in the other half, and each rank sent its part of that sum after it had emptied the first half.
    This holds for each row alone, so sums may have different numbers of rows.

    Attributes:
        rank: number of this rank.
        own: this rank's buffer, [2, size, max_rows, E / 2] int32: half, sending rank, row, and
            words of two 16-bit values (of columns i and i + E / 2). EMPTY at the start.
        addresses: [size] int64, the address of each rank's buffer on this rank's device.
        counts: [max_rows] int32, number of sums of each row so far. The device counts, so that a
            captured graph can be replayed.
        buffers: the buffers of all ranks as tensors, which only the definition in torch needs;
            empty if the other ranks are in other processes.
    """

    EMPTY: ClassVar[int] = EMPTY

    rank: int
    own: torch.Tensor
    addresses: torch.Tensor
    counts: torch.Tensor
    buffers: tuple[torch.Tensor, ...] = field(default=(), repr=False)

    @classmethod
    def at(cls, rank: int, own: torch.Tensor, addresses: Sequence[int]) -> PeerBuffers:
        """Make the record of one rank, with counts of 0.

        Args:
            rank: number of this rank.
            own: its buffer, EMPTY.
            addresses: addresses of all ranks' buffers on its device.
        """
        counts = torch.zeros(own.shape[2], dtype=torch.int32, device=own.device)
        return cls(rank, own, torch.tensor(addresses, dtype=torch.int64, device=own.device), counts)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.own.shape[1]

    @property
    def max_rows(self) -> int:
        """Rows of a sum at once; a longer sum goes through the buffers in several parts."""
        return self.counts.shape[0]

    @property
    def width(self) -> int:
        """E, the columns of a sum."""
        return 2 * self.own.shape[3]

    def serve(self, x: torch.Tensor) -> bool:
        """True if the sum of a tensor like x [T, E] can use the buffers and is fast there.

        Every rank reads all parts in full. For two ranks no algorithm moves less data. For more
        ranks, NCCL moves less per rank, so sums of many rows are left to it.
        """
        fits = self.size == 2 or x.shape[0] <= self.max_rows
        return fits and x.dtype in DTYPES and x.shape[1] == self.width


@dataclass(frozen=True)
class RankSum:
    """The sum of a tensor [T, E] over the ranks.

    Attributes:
        whole: sums any tensor and returns it.
        peers: the buffers through which a norm may compute a short sum, or None.
    """

    whole: Callable[[torch.Tensor], torch.Tensor]
    peers: PeerBuffers | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Sum now."""
        return self.whole(x)

    def peers_for(self, x: torch.Tensor) -> PeerBuffers | None:
        """Return the buffers if the norm may sum a tensor like x, else None."""
        return self.peers if self.peers is not None and self.peers.serve(x) else None
