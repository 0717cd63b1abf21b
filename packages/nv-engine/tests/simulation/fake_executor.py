"""A device without tensors.

The next token is a hash of the numbers that it reads back through the block table it was sent, so
that a wrong, stale or overwritten block changes the output. Every chunk hashes everything it reads:
at a hundred numbers that is a microsecond, and needs no trust in what was checked before. What a
hash cannot show is asserted: rows of chunks that do not follow each other, slots and blocks handed
on while an unread step uses them, blocks found before their step was read, copies that chain,
blocks that another salt wrote.
"""

from collections import Counter, deque

from fake_model import UNWRITTEN, draw, draw_seed, next_cell, said_of, stop_ids
from nv_engine.batch import StepResult


class Row:
    """The content of a slot from one admission to the next."""

    def __init__(self, admission, salt):
        self.tokens = admission.token_ids
        self.seed = draw_seed(admission.params, admission.seed)
        self.min_length = admission.prompt_len + admission.params.min_tokens
        self.stops = stop_ids(admission.params)
        self.prompt = admission.token_ids[: admission.prompt_len]
        self.wants_logprobs = admission.params.logprobs is not None
        self.wants_prompt = admission.prompt_logprobs is not None
        self.salt = salt
        self.pooling = admission.pooling
        self.adapter = admission.adapter  # its slot in the pool
        self.table = []
        self.length = None  # tokens computed; None: nothing yet
        self.last = None  # the token that it drew last


class FakeAdapters:
    """The images and the pool of a rank: an adapter's number stands for its values."""

    def __init__(self, facts):
        self.facts = facts
        self.images = {}
        self.pool = {}
        self.unreported = []
        self.delay = 0  # batches until an image is whole
        self.bad = set()  # numbers of adapters whose files are corrupt
        self.num_loads = 0

    def take(self, batch, in_use):
        self.unreported = [(wait - 1, source) for wait, source in self.unreported]
        for image, source in batch.fetches:
            assert 0 <= image < self.facts.num_images
            self.images[image] = source
            self.unreported.append((self.delay, source))
        for slot, image, key in batch.loads:
            assert 0 <= slot < self.facts.num_slots
            assert slot not in in_use, "an adapter is overwritten under an unread step"
            assert self.images[image].key == key, "an image was overwritten before its load"
            self.pool[slot] = self.images[image]
            self.num_loads += 1
        for admission in batch.admissions:
            assert admission.adapter == -1 or admission.adapter in self.pool

    def number(self, slot):
        """The number that a slot's adapter adds to each token; 0: none."""
        return 0 if slot == -1 else int(self.pool[slot].name)

    def has_failed(self, slot):
        return self.number(slot) in self.bad

    def news(self):
        ended = [source for wait, source in self.unreported if wait <= 0]
        self.unreported = [each for each in self.unreported if each[0] > 0]
        fetched = [source.key for source in ended if int(source.name) not in self.bad]
        bad = [source.key for source in ended if int(source.name) in self.bad]
        return fetched, dict.fromkeys(bad, "no such bytes") or None


class FakePending:
    def __init__(self, executor, number, result, blocks, slots):
        self.executor, self.number, self._result = executor, number, result
        self.blocks, self.slots = blocks, slots

    def result(self):
        self.executor.read(self)
        return self._result


class FakeExecutor:
    """Carries out batches one after another, as a CUDA stream does."""

    def __init__(self, facts, max_num_seqs, max_num_tokens, salt_of):
        self.facts = facts
        self.max_num_seqs, self.max_num_tokens = max_num_seqs, max_num_tokens
        size = facts.block_size
        self.cells = [[UNWRITTEN] * size for _ in range(facts.num_blocks)]
        self.writer = [None] * facts.num_blocks  # the row that wrote a block last
        self.written = [0] * facts.num_blocks  # and the number of that batch
        self.salts = [None] * facts.num_blocks  # and the salt of its request
        self.salt_of = salt_of  # of the request in a slot
        self.reading = Counter()  # block -> chunks of unread steps that read it
        self.rows = {}
        self.unread = deque()
        self.num_batches = self.num_read = 0
        self.max_burst = 0
        self.num_copies = 0
        self.adapters = FakeAdapters(facts.adapters)

    def submit(self, batch):
        self.num_batches += 1
        self._check(batch)
        self.adapters.take(batch, self._slots_in_use())
        for admission in batch.admissions:
            assert 0 <= admission.slot < self.max_num_seqs
            assert all(admission.slot not in step.slots for step in self.unread), "slot in use"
            self.rows[admission.slot] = Row(admission, self.salt_of(admission.slot))
        for append in batch.appends:
            self._append(append)
        self._copy(batch.copies)
        result = self._result(batch)
        rows, size = [self.rows[chunk.slot] for chunk in batch.chunks], self.facts.block_size
        blocks = [block for row in rows for block in row.table[: -(-row.length // size)]]
        self.reading.update(blocks)
        slots = {chunk.slot for chunk in batch.chunks}
        pending = FakePending(self, self.num_batches, result, blocks, slots)
        self.unread.append(pending)
        return pending

    def _slots_in_use(self):
        """Slots of the pool that unread steps read."""
        return {self.rows[slot].adapter for step in self.unread for slot in step.slots}

    def _result(self, batch):
        steps = [self._step(batch) for _ in range(batch.num_steps)]
        failed = {
            chunk.slot: "no such bytes"
            for chunk in batch.chunks
            if self.adapters.has_failed(self.rows[chunk.slot].adapter)
        }
        result = StepResult(steps, *self._logprobs(batch, steps), failed=failed or None)
        fetched, unfetched = self.adapters.news()
        return result._replace(fetched=fetched, unfetched=unfetched)

    def read(self, pending):
        """The host waits for a step."""
        assert self.unread.popleft() is pending, "results are read in order"
        self.reading.subtract(pending.blocks)
        self.num_read = pending.number

    def forget(self):
        """Forget the steps in flight, as the engine does when it recovers."""
        self.unread.clear()
        self.reading.clear()
        self.num_read = self.num_batches

    def close(self):
        self.rows.clear()

    def _check(self, batch):
        chunks = batch.chunks
        assert 0 < batch.num_tokens <= self.max_num_tokens
        assert len({chunk.slot for chunk in chunks}) == len(chunks), "a slot twice in a step"
        known = [bool(chunk.token_ids) for chunk in chunks]
        assert known == sorted(known), "decode rows come first"
        assert batch.num_steps == 1 or not any(known), "only decode rows burst"
        assert all(chunk.samples for chunk in chunks if not chunk.token_ids)
        self.max_burst = max(self.max_burst, batch.num_steps)

    def _append(self, append):
        row = self.rows[append.slot]
        assert append.first == len(row.table), "blocks are appended at the end of the table"
        assert append.first == 0 or row.length is not None
        for block in append.block_ids:
            assert self.written[block] <= self.num_read, "a block of a step that is not read"
            assert block not in row.table
        row.table += append.block_ids

    def _copy(self, copies):
        self.num_copies += len(copies)
        destinations = {copy.destination for copy in copies}
        assert len(destinations) == len(copies)
        assert not destinations & {copy.source for copy in copies}, "copies chain"
        for source, destination, count in copies:
            assert not self.reading[destination], "a block is overwritten under an unread step"
            assert self.cells[destination] is not self.cells[source]
            self.cells[destination][:] = [UNWRITTEN] * self.facts.block_size
            self.cells[destination][:count] = self.cells[source][:count]
            self.written[destination] = self.num_batches
            self.salts[destination] = self.salts[source]

    def _logprobs(self, batch, steps):
        """Return the token itself alone, of drawn tokens and of the prompts'."""
        sampling = [chunk.slot for chunk in batch.chunks if chunk.samples]
        drawn = {
            slot: [said_of(token) for token in tokens]
            for slot, tokens in zip(sampling, zip(*steps, strict=True), strict=True)
            if self.rows[slot].wants_logprobs
        }
        prompts = {}
        for slot, start, num_tokens, token_ids, _ in batch.chunks:
            row = self.rows[slot]
            if not (token_ids and row.wants_prompt):
                continue
            said = [said_of(token) for token in row.prompt[start + 1 : start + num_tokens + 1]]
            if said:
                prompts[slot] = said
        return drawn or None, prompts or None

    def _step(self, batch):
        return [token for chunk in batch.chunks if (token := self._compute(chunk)) is not None]

    def _compute(self, chunk):
        row, size = self.rows[chunk.slot], self.facts.block_size
        start = row.length if row.length is not None else chunk.start
        if chunk.token_ids:
            tokens = chunk.token_ids
            assert start == chunk.start, "chunks of a row follow each other"
            assert tokens == row.tokens[start : start + len(tokens)]
        else:
            assert row.last is not None, "the slot has drawn nothing yet"
            assert chunk.start <= start  # the row's own count runs ahead within a burst
            tokens = (row.last,)
        end = start + len(tokens)
        assert chunk.num_tokens == len(tokens)
        assert end <= len(row.table) * size, "no block for the token"
        self._write(row, start, tokens)
        row.length, row.last = end, None
        if not chunk.samples:
            return None
        row.last = draw(self._read(row, end), row.seed, row.min_length, row.stops)
        return row.last

    def _write(self, row, start, tokens):
        size, table = self.facts.block_size, row.table
        previous = self.cells[table[(start - 1) // size]][(start - 1) % size] if start else 0
        for position, token in enumerate(tokens, start):
            block = table[position // size]
            if self.writer[block] is not row:
                assert not self.reading[block], "a block is overwritten under an unread step"
                self.writer[block] = row
                if position % size == 0:
                    self.salts[block] = row.salt
            previous = next_cell(previous, token, self.adapters.number(row.adapter))
            self.cells[block][position % size] = previous
            self.written[block] = self.num_batches

    def _read(self, row, end):
        cells = []
        for block in row.table[: -(-end // self.facts.block_size)]:
            cells += self.cells[block]
            assert self.salts[block] == row.salt, "a block of another salt is read"
        del cells[end:]
        assert UNWRITTEN not in cells, "a token that was never computed is read"
        return cells
