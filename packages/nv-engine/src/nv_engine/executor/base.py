"""The road between the wings: what the engine asks of whoever runs the steps.

Owns the protocols and the facts an executor reports. Never decides what runs, never sees text.
"""

from dataclasses import dataclass
from typing import Protocol

from nv_engine.batch import Batch, StepResult
from nv_engine.config import LARGEST
from nv_engine.mixed import MixedSteps


@dataclass(frozen=True)
class ModelFacts:
    """What the host must know of the loaded model and of the memory left for its KV cache."""

    vocab_size: int
    """Token ids are 0 .. vocab_size - 1."""
    eos_token_ids: tuple[int, ...]
    """Every id that ends a completion."""
    max_model_len: int
    """Most tokens of a sequence, prompt and completion: the option or the model's own, if less."""
    num_blocks: int
    """Blocks of the KV cache (with several ranks: the minimum)."""
    block_size: int
    """Tokens in a block."""
    own_model_len: int = LARGEST
    """The model's own longest sequence, whatever max_model_len asks for."""
    mixed_steps: MixedSteps | None = None
    """How prompts come in beside decoding rows; None: as max_num_batched_tokens allows."""
    num_ids: int | None = None
    """Ids from here on are drawn only for requests that name them; None: all are."""


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


class RankWorker(Protocol):
    """One rank's model, ready to run batches: `nv_engine.device.worker.Worker`, or a test's."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    num_blocks: int
    block_size: int
    own_model_len: int
    mixed_steps: MixedSteps | None
    num_ids: int | None

    def run(self, batch: Batch) -> Pending:
        """Queue one step."""
        ...


def facts_of(worker: RankWorker) -> ModelFacts:
    """What a worker knows, for the host."""
    return ModelFacts(
        vocab_size=worker.vocab_size,
        eos_token_ids=worker.eos_token_ids,
        max_model_len=worker.max_model_len,
        num_blocks=worker.num_blocks,
        block_size=worker.block_size,
        own_model_len=worker.own_model_len,
        mixed_steps=worker.mixed_steps,
        num_ids=worker.num_ids,
    )
