"""Reference counts of blocks, and the free list.

Owns block numbers. Never knows what a block contains.
"""

from collections import OrderedDict


class BlockPool:
    """`num_blocks` blocks, each held by some tables or free; every operation is O(1).

    The free list is the LRU: blocks are taken from its front. A block whose content may be wanted
    again is given back at the end, one without such content at the front.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks without a holder, those with cached content included."""
        return len(self._free)

    def is_free(self, block: int) -> bool:
        """Whether `block` has no holder."""
        return not self._references[block]

    def references(self, block: int) -> int:
        """Count the holders of `block`."""
        return self._references[block]

    def take(self) -> int:
        """Take the least recently used free block; at least one must be free."""
        block, _ = self._free.popitem(last=False)
        self._references[block] = 1
        return block

    def pin(self, block: int) -> None:
        """Hold `block` once more; a free one leaves the free list with its content."""
        if not self._references[block]:
            del self._free[block]
        self._references[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """Drop one hold; without holders `block` is free, and is reused last if `keep`."""
        assert self._references[block] > 0, f"block {block} is freed twice"
        self._references[block] -= 1
        if not self._references[block]:
            self._free[block] = None
            if not keep:
                self._free.move_to_end(block, last=False)

    def check(self) -> None:
        """Assert that exactly the blocks without holders are free."""
        unheld = {block for block, count in enumerate(self._references) if not count}
        assert min(self._references) >= 0, "a block has a negative number of holders"
        assert unheld == self._free.keys(), (
            f"free list and counts differ: {unheld ^ self._free.keys()}"
        )
