"""The block table of one sequence.

Only `BlockManager` writes it; all other code reads it.
"""

from dataclasses import dataclass, field

from nv_cache.hashing import HashChain


@dataclass(frozen=True, slots=True)
class Copy:
    """Work for the device: the first `num_tokens` tokens of `source` go into `destination`."""

    source: int
    destination: int
    num_tokens: int


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence in order; token p lies in ids[p // block_size]."""

    chain: HashChain
    """The sequence's digests; keep it after `free` and give it to the next `match`."""
    epoch: int
    """The manager's reset count when the table began."""
    ids: list[int] = field(default_factory=list)
    """Block numbers, ceil(num_tokens / block_size) of them."""
    num_tokens: int = 0
    """Tokens that the blocks have room for: those found, and those of every `extend`."""
    num_cached: int = 0
    """Tokens that `match` found (or `fork` shares), copies included."""
    num_published: int = 0
    """Tokens that this table has made findable or found in full blocks."""
    copies: list[Copy] = field(default_factory=list)
    """Copies that the device must queue before it computes; emptied by `copied`."""
