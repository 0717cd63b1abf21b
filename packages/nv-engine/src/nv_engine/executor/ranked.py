"""RankedExecutor: an engine's steps on several ranks, wherever they run.

Owns what a failure of any rank means: the executor is dead, says why from then on, and leaves
nothing behind. Never starts a rank: its children do.
"""

import os
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from nv_models import ModelConfig, TensorParallel, resolve

from nv_engine.batch import Batch, StepResult
from nv_engine.config import EngineConfig
from nv_engine.executor.base import ModelFacts, Pending, RankPending, RankWorker
from nv_engine.executor.ranks import POLL_SECONDS, SETTLE_SECONDS, Ranks
from nv_engine.executor.shard import Outcome, Shard

CLOSE_SECONDS = 3.0
READY_SECONDS = 50e-6
ASK_SECONDS = 1.0
"""A step that takes longer is a reason to ask the ranks for signs of life."""


class Patience(NamedTuple):
    """How long a step is waited for, in seconds."""

    silence: float = 30.0
    """Of a rank that does not answer: its process is stopped, swapped out or cut off."""
    step: float = 600.0
    """Of a step, while all ranks answer."""


class RankZero(NamedTuple):
    """How the executor's thread runs rank 0, or speaks to it."""

    build: Callable[[], RankWorker]
    abort: Callable[[], None] = lambda: None
    """Let nothing wait for another rank any more."""
    pause: Callable[[], None] = lambda: time.sleep(READY_SECONDS)
    """Let a moment pass while a step runs, at most POLL_SECONDS."""


class RankedExecutor:
    """Runs batches on several ranks."""

    def __init__(
        self,
        ranks: Ranks,
        rank_zero: RankZero,
        *,
        patience: Patience | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Load the model.

        Args:
            ranks: the started ones; ended here if anything fails.
            rank_zero: the one that answers.
            patience: when a rank that lives is given up.
            release: what to give back when all ranks have ended.

        Raises:
            RuntimeError: a rank failed or died; the message names it and has its traceback.
        """
        self._failure: str | None = None
        self._patience = patience or Patience()
        self._ranks, self._rank_zero = ranks, rank_zero
        self._shard = Shard(rank_zero.build, ranks.send)
        self._stop = weakref.finalize(
            self, _close, os.getpid(), self._shard, ranks, rank_zero.abort, release
        )
        try:
            self._facts = self._load()
        except BaseException:
            ranks.kill()
            rank_zero.abort()
            self._stop()
            raise

    def _load(self) -> ModelFacts:
        """Wait for all ranks. A wrong checkpoint or option is rank 0's own error too."""
        loaded = self._shard.loaded
        while not loaded.wait(POLL_SECONDS):
            if self._ranks.failure() is not None:
                loaded.wait(SETTLE_SECONDS)
                break
        if loaded.error is None or isinstance(loaded.error, RuntimeError):
            if loaded.error is not None:
                self._ranks.failure(SETTLE_SECONDS)  # it may be what rank 0 stumbled over
            self._ranks.check()
        facts = loaded.get()
        while not self._ranks.reached("ready"):
            pass
        return facts

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
        """Where those ranks run, as messages say it."""
        return self._ranks.places

    def submit(self, batch: Batch) -> Pending:
        """Queue one step on every rank."""
        self._check()
        return _RankedPending(self, self._shard.submit(batch))

    def close(self) -> None:
        """End the ranks; a second call does nothing."""
        self._stop()

    def wait(self, step: Outcome[RankPending]) -> StepResult:
        """Wait for a step, and for news of a rank that died."""
        begun = time.monotonic()
        while not step.wait(POLL_SECONDS):
            self._check(begun)
        try:
            pending = step.get()
            while not pending.is_ready:
                self._check(begun)
                self._rank_zero.pause()
            return pending.result()
        except (RuntimeError, OSError) as error:
            if self._failure is not None:
                raise
            text = self._ranks.failure(SETTLE_SECONDS)
            self._fail(text or f"rank 0 of {self._ranks.size} failed: {error}")
            raise RuntimeError(self._failure) from error

    def _check(self, begun: float | None = None) -> None:
        """Raise if a rank is gone, or all of them, or too slow for a step that has `begun`."""
        if self._failure is None and not self._stop.alive:
            raise RuntimeError("the engine is closed: make a new one")
        if self._failure is None and (text := self._ranks.failure()) is not None:
            self._fail(text)
        if self._failure is None and (error := self._shard.error) is not None:
            self._fail(f"rank 0 of {self._ranks.size} failed in an earlier step: {error}")
        if self._failure is None and begun is not None and (text := self._overdue(begun)):
            self._fail(text)
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def _overdue(self, begun: float) -> str | None:
        """Why a step that began then is given up, if it is."""
        waited = time.monotonic() - begun
        if waited < ASK_SECONDS:
            return None
        silent = self._ranks.silent(self._patience.silence)
        if silent and waited > self._patience.silence:
            return (
                f"{' and '.join(silent)} has not answered for {self._patience.silence:g} s: "
                "the process is stopped, swapped out, or cut off from this one"
            )
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
        self._rank_zero.abort()
        self._stop()


class _RankedPending:
    """A step on its way through all ranks."""

    def __init__(self, executor: RankedExecutor, step: Outcome[RankPending]) -> None:
        self._executor, self._step = executor, step

    def result(self) -> StepResult:
        """Wait for the step."""
        return self._executor.wait(self._step)


def located(config: EngineConfig) -> EngineConfig:
    """Find the model once for all ranks, and see that they can share it.

    Raises:
        ValueError: the ranks do not divide the model.
    """
    folder = resolve(config.model, config.revision)
    model = ModelConfig.from_path(folder)
    parallel = TensorParallel(0, config.tensor_parallel_size)
    parallel.split(model.num_q_heads, "num_attention_heads")
    parallel.split_kv_heads(model.num_kv_heads)
    parallel.split(model.intermediate_size, "intermediate_size")
    return replace(config, model=str(folder))


def _close(
    owner: int,
    shard: Shard,
    ranks: Ranks,
    abort: Callable[[], None],
    release: Callable[[], None],
) -> None:
    """End thread and processes, in the process that started them (a fork of it leaves them)."""
    if os.getpid() != owner:
        return
    try:
        if not shard.close(CLOSE_SECONDS):
            ranks.kill()
            abort()
            shard.close(CLOSE_SECONDS)  # what it waited for is gone
    finally:
        abort()
        try:
            ranks.stop(CLOSE_SECONDS)
        finally:
            release()
