"""The cache's only interface: match, extend, publish, fork, free.

Owns the pool and the index and keeps them consistent. Never sees a tensor: it lists the copies that
the device must make. Not thread-safe.

The pool of fixed-size blocks is PagedAttention's (Kwon et al., 2023); sharing by hashed prefix and
a free list that doubles as the LRU follow vLLM's automatic prefix caching.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from nv_cache.events import BlockRemoved, BlockStored, CacheCleared, EventLog
from nv_cache.hashing import PART, TOKEN_BYTES, HashChain, pack
from nv_cache.pool import BlockPool
from nv_cache.prefix import PrefixIndex
from nv_cache.stats import CacheStats
from nv_cache.table import BlockTable, Copy


class BlockManager:
    """Gives sequences blocks of `block_size` tokens and finds the prefixes they share."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        events: EventLog | None = None,
    ) -> None:
        """Start with every block free and empty.

        Args:
            num_blocks: blocks in the pool, at least 1.
            block_size: tokens per block: 16, 32 or a multiple of 64.
            enable_prefix_caching: without it nothing is hashed, published or found.
            events: a log that records which blocks become findable and which are removed.

        Raises:
            ValueError: an argument is out of range.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}: it must be at least 1")
        if block_size not in (16, 32) and (block_size < 64 or block_size % 64):
            raise ValueError(f"block_size is {block_size}: it must be 16, 32 or a multiple of 64")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex(block_size)
        self._stats = CacheStats()
        self._events = events
        self._epoch = 0

    @property
    def num_free(self) -> int:
        """Blocks that no table holds, those with findable content included."""
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found, held or free."""
        return self._index.num_blocks

    @property
    def stats(self) -> CacheStats:
        """A copy of the counters."""
        return replace(self._stats)

    def match(
        self, tokens: Sequence[int], salt: bytes = b"", chain: HashChain | None = None
    ) -> BlockTable:
        """Find and pin the longest published prefix of `tokens`, leaving at least one token.

        After the full blocks, a block that begins like the rest (16 tokens or more, in steps of 16)
        is a partial hit: the table gets a block of its own and `copies` lists what the device must
        copy into it first. The source stays pinned until `copied` or `free`. If no block is free
        for the copy, the partial hit is left out.

        Args:
            tokens: all token ids so far; a packed buffer of 4-byte integers is fastest.
            salt: only sequences with an equal salt share blocks.
            chain: the `chain` of the sequence's earlier table, so that nothing is hashed twice.

        Returns:
            A new table with num_tokens == num_cached tokens.

        Raises:
            ValueError: `chain` has another salt or block size, or a token id is not a uint32.
        """
        if chain is None:
            chain = HashChain(self.block_size, salt)
        elif chain.block_size != self.block_size or salt not in (b"", chain.salt):
            raise ValueError(
                f"chain has block_size {chain.block_size} and salt {chain.salt!r}: they must be "
                f"{self.block_size} and {salt!r}; keep one chain per sequence"
            )
        table = BlockTable(chain, self._epoch)
        if self.enable_prefix_caching:
            self._match(table, tokens)
        return table

    def extend(self, table: BlockTable, n: int) -> bool:
        """Make room for `n` more tokens, or return False and change nothing."""
        if n < 0:
            raise ValueError(f"n is {n}: it must be at least 0; to shrink a table, free it")
        num_tokens = table.num_tokens + n
        missing = -(-num_tokens // self.block_size) - len(table.ids)
        if missing > 0:
            if missing > self._pool.num_free:
                return False
            table.ids.extend([self._take() for _ in range(missing)])
        table.num_tokens = num_tokens
        return True

    def publish(self, table: BlockTable, tokens: Sequence[int], upto: int) -> None:
        """Make `tokens[:upto]`, which the device has computed (or queued), findable.

        Full blocks become findable as such; of the last block every whole 16 tokens do, as the
        source of partial hits. Calling it again, or with less, does nothing. A table from before
        `reset` publishes nothing.

        Raises:
            ValueError: `upto` is past `tokens` or the table's room, or copies are outstanding.
        """
        if upto > table.num_tokens or upto > len(tokens):
            raise ValueError(
                f"upto is {upto}: the table has room for {table.num_tokens} tokens "
                f"and {len(tokens)} are given"
            )
        upto -= upto % PART
        if upto <= table.num_published or table.epoch != self._epoch:
            return
        if not self.enable_prefix_caching:
            return
        if table.copies:
            raise ValueError(f"copies is {table.copies}: queue them and call copied(table) first")
        chain, size, width = table.chain, self.block_size, self.block_size * TOKEN_BYTES
        first = table.num_published // size
        packed = pack(tokens, first * size, upto)
        num_hashed = len(chain.digests) - first
        assert num_hashed >= 0, "a published block is not hashed"
        chain.append(packed[num_hashed * width : (upto // size - first) * width])
        for index, start in enumerate(range(0, len(packed), width), first):
            name = self._index.add(table.ids[index], chain, index, packed[start : start + width])
            if name is not None and self._events is not None:
                self._events.add(BlockStored(name, chain.parent(index)))
        table.num_published = upto

    def copied(self, table: BlockTable) -> None:
        """Record that the device has queued `table.copies`: their sources may be reused."""
        copies, table.copies = table.copies, []
        for copy in copies:
            self._release(copy.source)

    def fork(self, table: BlockTable, num_tokens: int | None = None) -> BlockTable | None:
        """Start a second sequence with the same tokens: full blocks are shared, the last is copied.

        The device must have queued these tokens of the first sequence before the copy.

        Args:
            table: the first sequence's.
            num_tokens: how many of its tokens; None: all that the table has room for.

        Returns:
            The new table, or None (nothing changed) if the copy needs a block and none is free.

        Raises:
            ValueError: `table` has copies outstanding, or fewer tokens.
        """
        num_tokens = table.num_tokens if num_tokens is None else num_tokens
        if not 0 <= num_tokens <= table.num_tokens:
            raise ValueError(
                f"num_tokens is {num_tokens}: the table has room for {table.num_tokens}"
            )
        if table.copies:
            raise ValueError(f"copies is {table.copies}: queue them and call copied(table) first")
        num_full, rest = divmod(num_tokens, self.block_size)
        if rest and not self._pool.num_free:
            return None
        for block in table.ids[: num_full + (rest > 0)]:  # the last, if not full, to copy from
            self._pool.pin(block)
        child = BlockTable(table.chain.fork(num_full), table.epoch, table.ids[:num_full])
        child.num_tokens = child.num_cached = num_tokens
        child.num_published = min(table.num_published, num_full * self.block_size)
        if rest:
            child.ids.append(self._take())
            child.copies.append(Copy(table.ids[num_full], child.ids[-1], rest))
        return child

    def free(self, table: BlockTable) -> None:
        """Release the table's blocks, last first; they stay findable until they are reused.

        The table is empty afterwards and freeing it again does nothing; its `chain` stays.
        """
        self.copied(table)
        ids, table.ids = table.ids, []
        table.num_tokens = table.num_cached = table.num_published = 0
        for block in reversed(ids):
            self._release(block)

    def reset(self) -> None:
        """Forget all content, as after a change of weights; held blocks stay with their tables."""
        self._index.clear()
        self._epoch += 1
        if self._events is not None:
            self._events.add(CacheCleared())

    def check(self, tables: Iterable[BlockTable] | None = None) -> None:
        """Assert that pool and index are consistent and, given all live `tables`, that none leaks.

        Takes time in proportion to the pool: for tests.
        """
        self._pool.check()
        self._index.check()
        if tables is None:
            return
        holders: Counter[int] = Counter()
        for table in tables:
            assert len(table.ids) == -(-table.num_tokens // self.block_size), (
                "wrong number of blocks"
            )
            holders.update(table.ids)
            holders.update(copy.source for copy in table.copies)
        for block in range(self.num_blocks):
            count = self._pool.references(block)
            assert count == holders[block], (
                f"block {block} has {count} references, {holders[block]} in tables"
            )

    def _match(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Look all blocks up, which may raise, before pinning any, which must not raise."""
        num_wanted = max(len(tokens) - 1, 0)  # the device must compute at least one token
        num_blocks = num_wanted // self.block_size
        table.chain.extend(tokens, num_blocks)
        ids = self._index.find_blocks(table.chain, num_blocks)
        part = self._index.find_part(table.chain, len(ids), tokens, num_wanted)
        for block in ids:
            self._pool.pin(block)
        table.ids = ids
        table.num_tokens = table.num_published = len(ids) * self.block_size
        self._stats.hits += len(ids)
        self._stats.misses += num_blocks - len(ids)
        if part is not None:
            self._copy_part(table, *part)
        table.num_cached = table.num_tokens
        self._stats.query_tokens += len(tokens)
        self._stats.hit_tokens += table.num_cached

    def _copy_part(self, table: BlockTable, source: int, num_tokens: int) -> None:
        """Add to the table a block for a copy of `source`'s beginning, if one is free for it."""
        if self._pool.num_free <= self._pool.is_free(source):
            return  # pinning the source takes the last free block
        self._pool.pin(source)
        destination = self._take()
        table.ids.append(destination)
        table.copies.append(Copy(source, destination, num_tokens))
        table.num_tokens += num_tokens
        self._stats.partial_hits += 1

    def _take(self) -> int:
        """Return a free block, after removing what it held from the index."""
        block = self._pool.take()
        if block in self._index:
            self._stats.evictions += 1
            gone = self._index.remove(block)
            if gone is not None and self._events is not None:
                self._events.add(BlockRemoved(gone))
        return block

    def _release(self, block: int) -> None:
        self._pool.release(block, keep=block in self._index)
