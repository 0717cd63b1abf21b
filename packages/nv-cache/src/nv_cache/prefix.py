"""The index from prefix names to the blocks that contain them.

Owns the names under which a block can be found. Never knows whether a block is held or free.
"""

from collections import OrderedDict
from collections.abc import Sequence

from nv_cache.hashing import PART, TOKEN_BYTES, HashChain, beginnings, digest, pack

PART_BYTES = PART * TOKEN_BYTES


class PrefixIndex:
    """Digest -> the blocks that begin with those tokens after that prefix.

    A block has one digest per 16 tokens it holds, shortest first, so a block that is found
    by a long beginning is found by every shorter one. All copies of a prefix stay findable: one can
    be evicted and the others still hit.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        # Most names have one block, which is kept as a plain number.
        self._blocks: dict[bytes, int | OrderedDict[int, None]] = {}
        self._names: dict[int, list[bytes]] = {}
        self._parents: dict[int, bytes] = {}

    def __contains__(self, block: object) -> bool:
        """Whether `block` can be found."""
        return block in self._names

    @property
    def num_blocks(self) -> int:
        """Count the blocks that can be found."""
        return len(self._names)

    def find_blocks(self, chain: HashChain, num_blocks: int) -> list[int]:
        """Find the blocks of the longest known prefix, of at most `num_blocks` full blocks."""
        ids = []
        find, parent = self._find, chain.root
        for name in chain.digests[:num_blocks]:
            block = find(name, parent)
            if block is None:
                break
            ids.append(block)
            parent = name
        return ids

    def find_part(
        self, chain: HashChain, index: int, tokens: Sequence[int], num_wanted: int
    ) -> tuple[int, int] | None:
        """Find the block that shares most first tokens with block `index` of `tokens[:num_wanted]`.

        A binary search, which is correct because each block has all its shorter names too.

        Returns:
            (block, number of shared tokens, a multiple of 16 below block_size), or None.
        """
        start = index * self.block_size
        low, high = 0, min(num_wanted - start, self.block_size - PART) // PART
        if high == 0:
            return None
        parent = chain.parent(index)
        packed = pack(tokens, start, start + high * PART)
        best = None
        while low < high:
            middle = (low + high + 1) // 2
            block = self._find(digest(parent, packed[: middle * PART_BYTES]), parent)
            if block is None:
                high = middle - 1
            else:
                low, best = middle, (block, middle * PART)
        return best

    def add(self, block: int, chain: HashChain, index: int, packed: memoryview) -> bytes | None:
        """Make `block`, the sequence's block `index`, findable by its tokens so far, `packed`.

        Names that it already has are kept: a shared block may have some.

        Returns:
            The full block's name if this call made it findable, else None.
        """
        parent = self._parents[block] = chain.parent(index)
        known = self._names.setdefault(block, [])
        num_names, is_new = len(packed) // PART_BYTES, False
        is_full = num_names * PART == self.block_size
        ends = range(len(known) + 1, num_names + (not is_full))
        names = beginnings(parent, packed, ends) if ends else []
        if is_full and len(known) < num_names:
            names.append(chain.digests[index])
        known += names
        if len(names) > 1 and self._blocks.keys().isdisjoint(names):  # the usual case: all are new
            self._blocks.update(dict.fromkeys(names, block))
            is_new = True
        else:
            for name in names:
                is_new = self._add_name(name, block)
        return names[-1] if is_full and is_new else None

    def remove(self, block: int) -> bytes | None:
        """Remove `block`; returns its full name if no other block has that name."""
        del self._parents[block]
        names = self._names.pop(block)
        is_last = False
        for name in names:
            found = self._blocks.pop(name)
            is_last = isinstance(found, int)
            if isinstance(found, int):
                continue
            del found[block]
            self._blocks[name] = found if len(found) > 1 else next(iter(found))
        return names[-1] if is_last and len(names) * PART == self.block_size else None

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
            blocks = (found,) if isinstance(found, int) else found
            listed.update((name, block) for block in blocks)
        assert held == listed, f"names and blocks differ: {held ^ listed}"
        counts = {len(names) for names in self._names.values()}
        assert all(0 < count <= self.block_size // PART for count in counts), counts

    def _find(self, name: bytes, parent: bytes) -> int | None:
        """Find the newest block called `name`, if its prefix is really `parent`."""
        found = self._blocks.get(name)
        if found is None:
            return None
        block = found if isinstance(found, int) else next(reversed(found))
        return block if self._parents[block] == parent else None

    def _add_name(self, name: bytes, block: int) -> bool:
        """List `block` under `name`; True if it is the only one."""
        found = self._blocks.get(name)
        if found is None:
            self._blocks[name] = block
        elif isinstance(found, int):
            self._blocks[name] = OrderedDict.fromkeys((found, block))
        else:
            found[block] = None
        return found is None
