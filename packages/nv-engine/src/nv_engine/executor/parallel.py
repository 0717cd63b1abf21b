"""ParallelExecutor: an engine's steps on several ranks, wherever they run.

Owns what a failure of any rank means: the executor ends every rank, and raises the cause from then
on. Never starts a rank: its subclasses do. Never touches a device: every rank is a
process of its own, so that what waits there for a lost rank can always be ended, by ending it.
"""

import os
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from nv_models import TensorParallel, read_config, resolve

from nv_engine.batch import Batch, StepResult
from nv_engine.config import EngineConfig
from nv_engine.executor.executor import Pending
from nv_engine.executor.loss import DeviceLost
from nv_engine.executor.sender import QueuedStep, Sender
from nv_engine.executor.watch import POLL_SECONDS, RankWatch
from nv_engine.facts import ModelFacts
from nv_engine.log import LOGGER

CLOSE_SECONDS = 3.0
ASK_SECONDS = 1.0
"""A step that takes longer is a reason to ask the ranks for signs of life."""


class Patience(NamedTuple):
    """How long a step or a rank is waited for, in seconds."""

    silence: float = 30.0
    """Of a rank that does not answer: its process is stopped, swapped out or cut off."""
    step: float = 600.0
    """Of a step, while all ranks answer."""
    load: float = 120.0
    """Of a rank that does not answer while the model is loaded, from a slow disk perhaps."""


class ParallelExecutor:
    """Runs batches on several ranks; rank 0 answers."""

    def __init__(
        self,
        ranks: RankWatch,
        *,
        patience: Patience | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until every rank has loaded its shard.

        Args:
            ranks: the started ones, rank 0 first; ended here if anything fails.
            patience: when a rank that lives is given up.
            release: what to give back when all ranks have ended.

        Raises:
            RuntimeError: a rank failed or died; the message names it and has its traceback.
            Exception: of a rank, if it is not a RuntimeError: a wrong checkpoint or option.
        """
        self._failure: str | None = None
        self._patience = patience or Patience()
        self._ranks = ranks
        self._num_read = 0  # steps whose results are read or dropped
        self._sender = Sender(ranks.send)
        self._stop = weakref.finalize(self, _close, os.getpid(), self._sender, ranks, release)
        try:
            self._facts = _load(ranks, self._patience.load)
        except BaseException:
            ranks.kill()
            self._stop()
            raise
        LOGGER.info("ranks: %d (%s)", ranks.size, ", ".join(ranks.places))

    @property
    def facts(self) -> ModelFacts:
        """The loaded model's facts."""
        return self._facts

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the ranks that were started, in their order."""
        return self._ranks.process_ids

    @property
    def places(self) -> list[str]:
        """Where those ranks run, in the words of messages."""
        return self._ranks.places

    def submit(self, batch: Batch) -> Pending:
        """Queue one step on every rank."""
        self._check()
        return _ParallelStep(self, self._sender.submit(batch))

    def close(self) -> None:
        """End the ranks; a second call does nothing."""
        self._stop()

    def wait(self, step: QueuedStep) -> StepResult:
        """Wait for a step, and for news of a rank that died."""
        begun, answers = time.monotonic(), self._ranks.results
        self._check()
        while step.number not in answers:
            self._ranks.listen(POLL_SECONDS)
            self._check(begun)
        for unread in range(self._num_read + 1, step.number):  # of steps that were dropped
            answers.pop(unread, None)
        self._num_read = step.number
        return answers.pop(step.number)

    def _check(self, begun: float | None = None) -> None:
        """Raise if a rank is gone, or all of them, or too slow for a step that has `begun`."""
        if self._failure is None and not self._stop.alive:
            raise RuntimeError("the engine is closed: make a new one")
        if self._failure is None and (text := self._ranks.failure()) is not None:
            self._fail(text)
        if self._failure is None and (error := self._sender.error) is not None:
            self._fail(f"a batch could not be sent to every rank: {error!r}")
        if self._failure is None and begun is not None and (text := self._overdue(begun)):
            self._fail(text)
        if self._failure is not None:
            raise DeviceLost(self._failure)

    def _overdue(self, begun: float) -> str | None:
        """Why a step that began then is given up, if it is."""
        waited = time.monotonic() - begun
        if waited < ASK_SECONDS:
            return None
        silent = self._ranks.silent(self._patience.silence)
        if silent and waited > self._patience.silence:
            return _silence(silent, self._patience.silence)
        if waited > self._patience.step:
            return (
                f"a step has not ended for {self._patience.step:g} s, though every rank answers; "
                f"steps run by {self._ranks.progress}"
            )
        return None

    def _fail(self, text: str) -> None:
        """Nothing runs any more: end what is left of the ranks."""
        self._failure = f"{text}\n(make a new engine: this one has lost a rank)"
        self._ranks.kill()
        self._stop()


class _ParallelStep:
    """A step on its way through all ranks."""

    def __init__(self, executor: ParallelExecutor, step: QueuedStep) -> None:
        self._executor, self._step = executor, step

    def result(self) -> StepResult:
        """Wait for the step."""
        return self._executor.wait(self._step)


def _load(ranks: RankWatch, patience: float) -> ModelFacts:
    """Wait until all are ready."""
    while not ranks.reached("ready"):
        if silent := ranks.silent(patience):
            raise RuntimeError(_silence(silent, patience))
    assert ranks.facts is not None, "rank 0 is among them"
    return ranks.facts


def _silence(names: list[str], seconds: float) -> str:
    return (
        f"{' and '.join(names)} has not answered for {seconds:g} s: the process is stopped, "
        "swapped out, or cut off from this one"
    )


def located(config: EngineConfig) -> EngineConfig:
    """Find the model once for all ranks, and see that they can share it.

    Raises:
        ValueError: the ranks do not divide the model.
    """
    folder = resolve(config.model, config.revision)
    model = read_config(folder, config.hf_overrides)
    model.refuse_split(TensorParallel(0, config.tensor_parallel_size))
    return replace(config, model=str(folder))


def _close(owner: int, sender: Sender, ranks: RankWatch, release: Callable[[], None]) -> None:
    """End thread and processes, in the process that started them (a fork of it leaves them)."""
    if os.getpid() != owner:
        return
    try:
        if not sender.close(CLOSE_SECONDS):
            ranks.kill()
            sender.close(CLOSE_SECONDS)  # whom it waited for is gone
    finally:
        try:
            ranks.stop(CLOSE_SECONDS)
        finally:
            release()
