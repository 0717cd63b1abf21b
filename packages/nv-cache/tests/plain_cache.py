"""The manager's bookkeeping in plain dicts and lists: every call must agree with it."""

from nv_cache import BlockManager, BlockTable, Copy

PART = 16


class Sequence:
    """A table with what the model knows of it."""

    def __init__(self, table: BlockTable, tokens: list[int], salt: bytes) -> None:
        self.table, self.tokens, self.salt = table, tokens, salt
        self.ids = list(table.ids)
        self.copies = list(table.copies)
        self.num_tokens = table.num_tokens
        self.stale = False


class Model:
    """Every call goes to the manager and to plain dicts and lists; they must agree exactly."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.real = BlockManager(num_blocks, block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free_blocks = list(range(num_blocks))  # least recently used first
        self.references = [0] * num_blocks
        self.known: dict[tuple[bytes, tuple[int, ...]], set[int]] = {}  # prefix -> its holders
        self.content: dict[int, list[tuple[bytes, tuple[int, ...]]]] = {}  # block -> its prefixes
        self.sequences: list[Sequence] = []

    def take(self) -> int:
        block = self.free_blocks.pop(0)
        for prefix in self.content.pop(block, ()):
            self.known[prefix].remove(block)
            if not self.known[prefix]:
                del self.known[prefix]
        self.references[block] = 1
        return block

    def pin(self, block: int) -> None:
        if not self.references[block]:
            self.free_blocks.remove(block)
        self.references[block] += 1

    def release(self, block: int) -> None:
        self.references[block] -= 1
        if not self.references[block]:
            self.free_blocks.insert(len(self.free_blocks) if block in self.content else 0, block)

    def holders(self, salt: bytes, tokens: list[int], length: int) -> set[int]:
        return self.known.get((salt, tuple(tokens[:length])), set())

    def match(self, tokens: list[int], salt: bytes, chain: object = None) -> Sequence:
        size, limit = self.block_size, max(len(tokens) - 1, 0)
        full = 0
        while (full + 1) * size <= limit and self.holders(salt, tokens, (full + 1) * size):
            full += 1
        part = (min(limit - full * size, size - PART) // PART) * PART
        while part > 0 and not self.holders(salt, tokens, full * size + part):
            part -= PART

        table = self.real.match(tokens, salt, chain)
        for index, block in enumerate(table.ids[:full]):
            assert block in self.holders(salt, tokens, (index + 1) * size)
            self.pin(block)
        if part and table.copies:
            (copy,) = table.copies
            assert copy.source in self.holders(salt, tokens, full * size + part)
            self.pin(copy.source)
            assert table.copies == [Copy(copy.source, self.take(), part)]
            assert table.ids[full:] == [copy.destination]
        elif part:  # left out: no block was free but the source
            sources = self.holders(salt, tokens, full * size + part)
            assert not self.free_blocks or (
                len(self.free_blocks) == 1 and self.free_blocks[0] in sources
            )
            part = 0
        assert len(table.ids) == full + bool(part)
        assert table.num_tokens == table.num_cached == full * size + part
        self.sequences.append(Sequence(table, list(tokens), salt))
        return self.sequences[-1]

    def extend(self, sequence: Sequence, new: list[int]) -> None:
        """Make room for the known tokens that are not covered yet, and for `new`."""
        tokens = sequence.tokens + new
        total = len(tokens)
        missing = -(-total // self.block_size) - len(sequence.ids)
        fits = missing <= len(self.free_blocks)
        assert self.real.extend(sequence.table, total - sequence.num_tokens) is fits
        if fits:
            sequence.ids += [self.take() for _ in range(missing)]
            sequence.tokens, sequence.num_tokens = tokens, total

    def publish(self, sequence: Sequence, upto: int) -> None:
        self.real.publish(sequence.table, sequence.tokens, upto)
        if sequence.stale:
            return
        for length in range(PART, upto + 1, PART):
            block = sequence.ids[(length - 1) // self.block_size]
            prefix = (sequence.salt, tuple(sequence.tokens[:length]))
            if prefix not in self.content.setdefault(block, []):
                self.content[block].append(prefix)
                self.known.setdefault(prefix, set()).add(block)

    def copied(self, sequence: Sequence) -> None:
        self.real.copied(sequence.table)
        for copy in sequence.copies:
            self.release(copy.source)
        sequence.copies = []

    def fork(self, sequence: Sequence, num_tokens: int) -> None:
        full, rest = divmod(num_tokens, self.block_size)
        table = self.real.fork(sequence.table, num_tokens)
        assert (table is None) == (rest > 0 and not self.free_blocks)
        if table is None:
            return
        for block in sequence.ids[: -(-num_tokens // self.block_size)]:
            self.pin(block)
        own = [self.take()] if rest else []
        assert table.ids == sequence.ids[:full] + own
        assert table.copies == [Copy(sequence.ids[full], block, rest) for block in own]
        assert table.num_tokens == table.num_cached == num_tokens
        child = Sequence(table, sequence.tokens[:num_tokens], sequence.salt)
        child.stale = sequence.stale
        self.sequences.append(child)

    def free(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self.real.free(sequence.table)
        for copy in sequence.copies:
            self.release(copy.source)
        for block in reversed(sequence.ids):
            self.release(block)
        assert not sequence.table.ids
        assert not sequence.table.copies

    def preempt(self, sequence: Sequence) -> None:
        """Free it and match it again with all its tokens and its chain."""
        self.free(sequence)
        self.match(sequence.tokens, sequence.salt, sequence.table.chain)

    def reset(self) -> None:
        self.real.reset()
        self.known.clear()
        self.content.clear()
        for sequence in self.sequences:
            sequence.stale = True

    def check(self) -> None:
        self.agree()
        self.real.check([sequence.table for sequence in self.sequences])
        for sequence in self.sequences:
            assert sequence.table.ids == sequence.ids
            assert sequence.table.num_tokens == sequence.num_tokens

    def finish(self) -> None:
        for sequence in list(self.sequences):
            self.free(sequence)
        self.check()
        assert self.real.num_free == self.num_blocks

    def agree(self) -> None:
        """The cheap part of `check`."""
        assert self.real.num_free == len(self.free_blocks)
        assert self.real.num_cached_blocks == len(self.content)


def prompt(words: list[int], tail: int) -> list[int]:
    """Words of 16 tokens from a small vocabulary, so that prefixes meet, and a ragged end."""
    return [word * PART + i for word in words for i in range(PART)] + [7] * tail
