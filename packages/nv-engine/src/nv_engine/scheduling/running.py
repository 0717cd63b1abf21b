"""RunningSequences: the sequences on the device, in which slot and on which blocks.

Owns the slots and the running sequences' block tables. Never decides which sequence runs, only
whether there is room. Which block is taken is nv_cache's choice.
"""

from dataclasses import replace

from nv_cache import BlockManager, BlockTable

from nv_engine.batch import NO_ADAPTER, Admission, BlockAppend, BlockCopy, StepResult
from nv_engine.scheduling.adapter_slots import AdapterSlots
from nv_engine.scheduling.draft import Draft
from nv_engine.scheduling.sequence import Sequence


class RunningSequences:
    """Slots 0 .. num_slots - 1 over one pool of blocks."""

    def __init__(
        self, blocks: BlockManager, num_slots: int, adapters: AdapterSlots | None = None
    ) -> None:
        self.blocks = blocks
        self.adapters = adapters
        self.by_slot: dict[int, Sequence] = {}  # the oldest admission first
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._refused: Sequence | None = None  # did not fit, and no block was freed since

    @property
    def has_slot(self) -> bool:
        """True if a slot is free."""
        return bool(self._free_slots)

    def place(self, sequence: Sequence, draft: Draft, sibling: Sequence | None = None) -> bool:
        """Allocate blocks for all known tokens of a sequence, and a free slot.

        A sequence that is alone always fits: its length limit is at most the pool's.

        Args:
            sequence: one that waits.
            draft: the step that is to admit it.
            sibling: a running sequence whose computed prompt it can share.

        Returns:
            False, with nothing changed, if there are too few blocks.
        """
        if sequence is self._refused:
            return False
        table = self._find(sequence, sibling)
        copies = [
            BlockCopy(each.source, each.destination, each.num_tokens) for each in table.copies
        ]
        if not self._fill(table, len(sequence.token_ids)):
            self.blocks.free(table)
            self._refused = sequence
            return False
        # A prompt computed for a sibling is not a hit of the cache.
        num_cached = sibling.num_cached_tokens if sibling else table.num_cached
        sequence.place(self._free_slots.pop(), table, num_cached)
        self.by_slot[sequence.slot] = sequence
        adapter = NO_ADAPTER
        if self.adapters is not None:
            adapter = self.adapters.slot_of(sequence)
            self.adapters.take(sequence)
        draft.admissions.append(admission(sequence, adapter))
        draft.appends.append(BlockAppend(sequence.slot, 0, tuple(table.ids)))
        draft.copies += copies
        draft.placed.append(sequence)
        return True

    def _find(self, sequence: Sequence, sibling: Sequence | None) -> BlockTable:
        """A table of the tokens computed already: a sibling's prompt, or cached blocks."""
        if sibling is not None:
            table = self.blocks.fork(sibling.table, sequence.prompt_len - 1)
            if table is not None:
                return table
        known = sequence.token_ids if sequence.reads_cache else ()
        return self.blocks.match(known, sequence.cache_salt, sequence.chain)

    def _fill(self, table: BlockTable, num_tokens: int) -> bool:
        """Allocate whole blocks for a new table's tokens, or return False."""
        size, has_copies = self.blocks.block_size, bool(table.copies)
        num_missing = -(-num_tokens // size) * size - table.num_tokens
        if self.blocks.extend(table, num_missing):
            return True
        # The pinned source of a partial hit may be the one block that is missing. It can be let go
        # before the copy: extend then takes every free block, so no later copy of this batch can
        # have the source as its destination.
        self.blocks.copied(table)
        return has_copies and self.blocks.extend(table, num_missing)

    def reserve(self, sequence: Sequence, end: int, draft: Draft) -> bool:
        """Allocate whole blocks up to token `end` of a running sequence.

        Returns:
            False, with nothing changed, if there are too few.
        """
        table, size = sequence.table, self.blocks.block_size
        num_held, num_needed = len(table.ids), -(-end // size)
        if num_needed > num_held:
            if not self.blocks.extend(table, num_needed * size - table.num_tokens):
                return False
            new_ids = tuple(table.ids[num_held:])
            draft.appends.append(BlockAppend(sequence.slot, num_held, new_ids))
        return True

    def note(self, result: StepResult) -> None:
        """Hand a step's log-probabilities, results and failures to those that they are of."""
        for slot, tokens in (result.logprobs or {}).items():
            self.by_slot[slot].keep_logprobs(tokens)
        for slot, tokens in (result.prompt_logprobs or {}).items():
            self.by_slot[slot].add_prompt_logprobs(tokens)
        for slot, pooled in (result.pooled or {}).items():
            self.by_slot[slot].keep_pooled(pooled)
        for slot in result.broken:
            self.by_slot[slot].break_off()
        for slot, why in (result.failed or {}).items():
            self.by_slot[slot].break_off(why)
        if self.adapters is not None:
            self.adapters.note(result.fetched, result.unfetched or {})

    def burst(self, most: int) -> int:
        """How many decode steps, `most` at most, can run at once before anything is due.

        Due is the prefill of a running sequence, a sequence's last token, a grammar's next mask, or
        a block while none is free.
        """
        if most == 1:
            return 1
        size, num_steps, rows = self.blocks.block_size, most, []
        for sequence in self.by_slot.values():
            left = sequence.limit - 1 - sequence.num_scheduled
            if sequence.finish_reason is not None or left <= 0:
                continue  # nothing more to schedule for it
            if not sequence.decoding or sequence.matcher is not None:
                return 1
            rows.append(sequence)
            num_steps = min(num_steps, left)
        num_missing = 0
        for sequence in rows:
            num_blocks = -(-(sequence.num_scheduled + num_steps) // size)
            num_missing += max(num_blocks - len(sequence.table.ids), 0)
        return num_steps if num_missing <= self.blocks.num_free else 1

    def release(self, sequence: Sequence) -> None:
        """Take slot and blocks from a running sequence with nothing in flight."""
        self.blocks.free(sequence.table)
        if self.adapters is not None:
            self.adapters.release(sequence)
        del self.by_slot[sequence.slot]
        self._free_slots.append(sequence.slot)
        sequence.unplace()
        self._refused = None


def admission(sequence: Sequence, adapter: int = NO_ADAPTER) -> Admission:
    """The message that puts a sequence into its slot on the device, with its adapter's slot."""
    params = sequence.params
    wants_prompt = sequence.prompt_logprobs is not None
    num_logprobs = params.prompt_logprobs if wants_prompt else None
    if sequence.matcher is not None and params.min_tokens:
        params = replace(params, min_tokens=0)  # its masks forbid the stop tokens
    known = tuple(sequence.token_ids)
    return Admission(
        sequence.slot,
        params,
        sequence.seed,
        sequence.prompt_len,
        known,
        num_logprobs,
        sequence.pooling,
        adapter,
    )
