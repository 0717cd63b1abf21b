"""Executor: what the engine asks of an object that runs its steps.

Owns the protocols of an executor, of a step in flight and of one rank. Never runs a step.
"""

from typing import Protocol, runtime_checkable

from nv_engine.batch import Batch, StepResult
from nv_engine.facts import ModelFacts


class Pending(Protocol):
    """A step that is on its way."""

    def result(self) -> StepResult:
        """Wait for the step and return its tokens.

        Called at most once, in the order of submission. A Pending may also be dropped unread (after
        an interrupt), which must cost the executor nothing but the step's time.

        Raises:
            RuntimeError: the step failed on the device (torch's own errors are RuntimeErrors).
        """
        ...


class Executor(Protocol):
    """Runs batches strictly in the order of submission.

    Because of that order, what a batch overwrites can never be seen by an earlier one: a copy in
    `batch.copies` happens before any write of its own batch, and the copies of a batch never chain.
    """

    @property
    def facts(self) -> ModelFacts:
        """The loaded model's facts; constant for the executor's life."""
        ...

    def submit(self, batch: Batch) -> Pending:
        """Queue one step and return at once.

        After an error or an interrupt in here, the engine treats every slot as unknown: a sequence
        that lives on is admitted again (whole block table, whole token list) before it is used.

        Raises:
            RuntimeError: the step could not be queued, or an earlier one failed.
        """
        ...

    def close(self) -> None:
        """Release the device; a second call does nothing."""
        ...


@runtime_checkable
class Resting(Protocol):
    """An executor that does other work in the waits for its steps, and may leave it half done."""

    def rest(self) -> None:
        """End that work: after this the process may wait for the whole device."""
        ...


class RankWorker(Protocol):
    """One rank's model, ready to run batches: a `nv_engine.device.runner.Runner`, or a test's."""

    @property
    def facts(self) -> ModelFacts:
        """The loaded model's facts; the same on every rank."""
        ...

    def run(self, batch: Batch) -> Pending:
        """Queue one step."""
        ...
