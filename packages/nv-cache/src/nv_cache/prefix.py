"""What a block contains: the index from prefix names to blocks.

Owns the names under which a block can be found. Never knows whether a block is held or free.
"""

from collections import OrderedDict

from nv_cache.hashing import PART, TOKEN_BYTES, digest

PART_BYTES = PART * TOKEN_BYTES


class PrefixIndex:
    """Digest -> the blocks that begin with those tokens after that prefix.

    A block is known by one digest for each 16 tokens it holds, shortest first, so whatever is found
    by a long beginning is found by every shorter one. All copies of a prefix stay findable: one can
    be evicted and the others still hit.
    """

    def __init__(self) -> None:
        # A name mostly has one block, kept as a plain number.
        self._blocks: dict[bytes, int | OrderedDict[int, None]] = {}
        self._names: dict[int, list[bytes]] = {}
        self._parents: dict[int, bytes] = {}

    def __len__(self) -> int:
        """Count the names."""
        return len(self._blocks)

    def __contains__(self, block: object) -> bool:
        """Whether `block` can be found."""
        return block in self._names

    @property
    def num_blocks(self) -> int:
        """How many blocks can be found."""
        return len(self._names)

    def find(self, name: bytes, parent: bytes) -> int | None:
        """Find the newest block called `name` whose prefix is really `parent`."""
        found = self._blocks.get(name)
        if found is None:
            return None
        block = found if isinstance(found, int) else next(reversed(found))
        return block if self._parents[block] == parent else None

    def find_longest(self, parent: bytes, packed: memoryview) -> tuple[int, int] | None:
        """Find the block that shares the most with `packed` after `parent`.

        Searches by halving, which is sound as each block has all its shorter names too.

        Returns:
            (block, number of shared tokens, a multiple of 16), or None.
        """
        best = None
        low, high = 0, len(packed) // PART_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            block = self.find(digest(parent, packed[: middle * PART_BYTES]), parent)
            if block is None:
                high = middle - 1
            else:
                low, best = middle, (block, middle * PART)
        return best

    def num_names(self, block: int) -> int:
        """How many names `block` has: its findable tokens divided by 16 (or by a block of 16)."""
        return len(self._names.get(block, ()))

    def add(self, block: int, name: bytes, parent: bytes) -> bool:
        """Give `block` its next longer name; True if no other block has that name."""
        self._names.setdefault(block, []).append(name)
        self._parents[block] = parent
        found = self._blocks.get(name)
        if found is None:
            self._blocks[name] = block
        elif isinstance(found, int):
            self._blocks[name] = OrderedDict.fromkeys((found, block))
        else:
            found[block] = None
        return found is None

    def remove(self, block: int) -> list[bytes]:
        """Forget `block`; returns the names that no block has any more, shortest first."""
        gone = []
        del self._parents[block]
        for name in self._names.pop(block):
            found = self._blocks[name]
            if isinstance(found, int):
                del self._blocks[name]
                gone.append(name)
                continue
            del found[block]
            if len(found) == 1:
                self._blocks[name] = next(iter(found))
        return gone

    def clear(self) -> None:
        """Forget every block."""
        self._blocks.clear()
        self._names.clear()
        self._parents.clear()

    def check(self) -> None:
        """Assert that names and blocks point at each other and nothing else is kept."""
        assert self._names.keys() == self._parents.keys(), "a block lacks its names or its parent"
        held = {(name, block) for block, names in self._names.items() for name in names}
        listed: set[tuple[bytes, int]] = set()
        for name, found in self._blocks.items():
            assert isinstance(found, int) or len(found) > 1, "one block is listed as several"
            listed.update(
                (name, block) for block in ((found,) if isinstance(found, int) else found)
            )
        assert held == listed, f"names and blocks differ: {held ^ listed}"
        assert all(self._names.values()), "a block without a name is kept"
