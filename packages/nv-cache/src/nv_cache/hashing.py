"""Names for prefixes: an xxh3-128 chain over a sequence's blocks.

Owns how tokens become digests. Never knows which block holds the tokens, or whether one does.

A digest covers its block's tokens and, through the parent's digest, all tokens before them, so
equal content after different beginnings has different names. The same form names the first tokens
of a block: ``digest(parent, tokens)`` for 16, 32, ... tokens, up to the full block.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from xxhash import xxh3_128_digest

PART: Final = 16
"""A block's beginning has a digest after every PART tokens."""

TOKEN_BYTES: Final = array("I").itemsize


def pack(tokens: Sequence[int], start: int, stop: int) -> memoryview:
    """Lay tokens[start:stop] out as bytes, 4 per token in the machine's order.

    A contiguous buffer of 4-byte integers (array("I"), array("i"), a memoryview or an int32 array)
    is used in place; anything else is copied once.

    Raises:
        ValueError: a token id does not fit in 32 unsigned bits.
    """
    view = _four_byte_view(tokens)
    if view is not None:
        return view[start:stop].cast("B")
    part = tokens[start:stop]
    packed = array("I")
    try:
        packed.fromlist(part if isinstance(part, list) else list(part))
    except OverflowError:
        wrong = next(token for token in part if not 0 <= token < 2**32)
        raise ValueError(
            f"token id {wrong} is not valid: it must be an integer from 0 to {2**32 - 1}"
        ) from None
    return memoryview(packed).cast("B")


def _four_byte_view(tokens: Sequence[int]) -> memoryview | None:
    """View `tokens` as they lie in memory, or None if they are not packed 4-byte integers."""
    if isinstance(tokens, list | tuple):
        return None
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]  # any sequence may offer a buffer
    except TypeError:
        return None
    return view if view.format in ("I", "i") and view.c_contiguous else None


def digest(parent: bytes, packed: memoryview) -> bytes:
    """Name the tokens `packed` that follow the prefix named `parent` (16 bytes)."""
    return xxh3_128_digest(parent + packed)


def beginnings(parent: bytes, packed: memoryview, ends: Iterable[int]) -> list[bytes]:
    """Name several beginnings of `packed` at once, each of `end` times 16 tokens."""
    text, root, width = parent + packed, len(parent), PART * TOKEN_BYTES
    return [xxh3_128_digest(text[: root + end * width]) for end in ends]


class HashChain:
    """The digests of one growing sequence, one per full block, each computed once.

    Keep it with the sequence: a request that is matched again (while it waits, or after preemption)
    then hashes only what is new. The tokens already covered must not change.
    """

    __slots__ = ("block_size", "digests", "root", "salt")

    def __init__(self, block_size: int, salt: bytes = b"") -> None:
        """Start a chain; sequences share prefixes only under an equal `salt` (tenant, adapter)."""
        self.block_size = block_size
        self.salt = salt
        self.root = xxh3_128_digest(salt)
        self.digests: list[bytes] = []

    def extend(self, tokens: Sequence[int], num_blocks: int) -> None:
        """Cover the first `num_blocks` full blocks of `tokens`; what is covered is not read."""
        first = len(self.digests)
        if num_blocks > first:
            self.append(pack(tokens, first * self.block_size, num_blocks * self.block_size))

    def append(self, packed: memoryview) -> None:
        """Cover the next full blocks, whose tokens are `packed`."""
        width = self.block_size * TOKEN_BYTES
        parent = self.parent(len(self.digests))
        for start in range(0, len(packed), width):
            parent = digest(parent, packed[start : start + width])
            self.digests.append(parent)

    def parent(self, index: int) -> bytes:
        """Name of the prefix before block `index`."""
        return self.digests[index - 1] if index else self.root

    def fork(self, num_blocks: int) -> "HashChain":
        """Copy the first `num_blocks` digests, for a sequence that continues differently."""
        chain = HashChain(self.block_size, self.salt)
        chain.digests = self.digests[:num_blocks]
        return chain
