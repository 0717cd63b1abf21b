"""Draft: a batch that is being filled, and Flight: a batch in flight.

Own the lists of one step, and the tokens that are left in it: they bound the chunk of each prompt.
Never decide which sequences the step computes, or in which order.
"""

from typing import NamedTuple

from nv_engine.batch import (
    AdapterFetch,
    AdapterLoad,
    Admission,
    Batch,
    BlockAppend,
    BlockCopy,
    Chunk,
    TokenMask,
)
from nv_engine.mixed import MixedSteps
from nv_engine.scheduling.sequence import Sequence


class Flight(NamedTuple):
    """A step between schedule and commit."""

    step: int
    batch: Batch
    rows: list[Sequence]
    """Sequences whose chunks sample, in the order of the result."""
    partial: list[tuple[Sequence, int]]
    """Sequences whose chunks do not sample, and where these end."""
    num_decodes: int
    """Chunks whose token the device has."""
    num_prefill_tokens: int
    """Tokens of the other chunks."""


class Draft:
    """The work of one step; filled by the scheduler, sealed once."""

    __slots__ = (
        "admissions",
        "appends",
        "budget",
        "chunks",
        "copies",
        "held",
        "is_short",
        "masks",
        "num_decodes",
        "num_prefill_tokens",
        "num_steps",
        "partial",
        "placed",
        "prefills",
        "rows",
        "step",
    )

    def __init__(self, step: int, num_steps: int, budget: int) -> None:
        self.step = step
        self.num_steps = num_steps
        self.budget = budget  # tokens left in the step
        self.num_decodes = 0
        self.num_prefill_tokens = 0
        self.is_short = False  # of blocks: no sequence is admitted
        self.held: list[Sequence] = []  # not scheduled, so that they can be preempted soon
        self.prefills: list[Sequence] = []  # running, with known tokens to compute
        self.chunks: list[Chunk] = []
        self.rows: list[Sequence] = []
        self.partial: list[tuple[Sequence, int]] = []
        self.admissions: list[Admission] = []
        self.appends: list[BlockAppend] = []
        self.copies: list[BlockCopy] = []
        self.masks: list[TokenMask] = []
        self.placed: list[Sequence] = []  # the admitted, whose tables' copies are in `copies`

    def end_decodes(self, mixed: MixedSteps | None, num_waiting: int) -> None:
        """Count the rows so far as decoding ones, and see how many tokens of prompts may come.

        Args:
            mixed: how they come in beside such rows.
            num_waiting: tokens of those that wait for a slot.
        """
        self.num_decodes = len(self.rows)
        self.budget -= self.num_decodes
        if mixed is None or not self.rows:
            return
        oldest = self.rows[0]
        num_waiting += sum(len(each.token_ids) - each.num_scheduled for each in self.prefills)
        most = mixed.most(self.num_decodes, num_waiting, oldest.limit - oldest.num_scheduled)
        if most is not None:
            self.budget = min(self.budget, most)

    def hold(self, sequence: Sequence) -> None:
        """Leave a running sequence out from now on, so that it can be preempted soon."""
        sequence.hold()
        self.held.append(sequence)

    def mask(self, sequence: Sequence) -> None:
        """Add the mask of a sequence's grammar; if that fails, its draw is not used."""
        mask = sequence.mask()
        if mask is not None:
            self.masks.append(mask)

    def prefill(self, sequence: Sequence) -> None:
        """Add as many known tokens of a placed sequence as the budget allows."""
        start, known = sequence.num_scheduled, sequence.token_ids
        end = min(len(known), start + self.budget)
        samples = end == len(known)
        token_ids = tuple(known[start:end])
        self.chunks.append(Chunk(sequence.slot, start, end - start, token_ids, samples))
        if samples:
            if sequence.matcher is not None:
                self.mask(sequence)
            self.rows.append(sequence)
        else:
            self.partial.append((sequence, end))
        sequence.schedule(end, self.step)
        self.budget -= end - start
        self.num_prefill_tokens += end - start

    def seal(
        self, fetches: tuple[AdapterFetch, ...] = (), loads: tuple[AdapterLoad, ...] = ()
    ) -> Flight:
        """The finished batch with the sequences that wait for its result.

        Args:
            fetches: adapters that the ranks begin to read.
            loads: adapters that go to the device before the step.
        """
        batch = Batch(
            tuple(self.chunks),
            tuple(self.admissions),
            tuple(self.appends),
            tuple(self.copies),
            self.num_steps,
            tuple(self.masks),
            fetches,
            loads,
        )
        return Flight(
            self.step, batch, self.rows, self.partial, self.num_decodes, self.num_prefill_tokens
        )
