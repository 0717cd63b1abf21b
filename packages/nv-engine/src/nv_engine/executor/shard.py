"""Shard: rank 0 of several, on a thread of the caller's process.

Owns that thread. On a thread of its own a step always runs to its end: a Ctrl-C that hits the
caller cannot leave rank 0 between two sums that the other ranks wait in.
"""

import pickle
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from nv_engine.batch import Batch
from nv_engine.executor.base import ModelFacts, RankPending, RankWorker, facts_of

T = TypeVar("T")


class Outcome(Generic[T]):
    """A value or an error that a thread will hand over."""

    def __init__(self) -> None:
        self._is_there = threading.Event()
        self._value: T | None = None
        self.error: BaseException | None = None

    def put(self, value: T | None, error: BaseException | None = None) -> None:
        """Hand it over; once."""
        self._value, self.error = value, error
        self._is_there.set()

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds; True if it is there."""
        return self._is_there.wait(timeout)

    def get(self) -> T:
        """The value, or raise the error."""
        if self.error is not None:
            raise self.error
        assert self._value is not None, "wait first"
        return self._value


class _Step(NamedTuple):
    batch: Batch
    outcome: Outcome[RankPending]


class Shard:
    """Sends each batch to the other ranks, then runs it, in order of submission.

    After an error it runs nothing more: the ranks may no longer be at the same step.
    """

    def __init__(self, build: Callable[[], RankWorker], send: Callable[[bytes], None]) -> None:
        """Begin to build the worker; `loaded` tells when it is there."""
        self.loaded: Outcome[ModelFacts] = Outcome()
        self.error: BaseException | None = None  # what ended the thread, if an error did
        self._steps: SimpleQueue[_Step | None] = SimpleQueue()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, args=(build, send), name="nv_engine rank 0", daemon=True
        )
        self._thread.start()

    def submit(self, batch: Batch) -> Outcome[RankPending]:
        """Queue a step."""
        step = _Step(batch, Outcome())
        self._steps.put(step)
        return step.outcome

    def close(self, timeout: float) -> bool:
        """Run no further step; True if the thread ended within `timeout` seconds."""
        self._is_closed.set()
        self._steps.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _serve(self, build: Callable[[], RankWorker], send: Callable[[bytes], None]) -> None:
        """The thread: holds the worker, and drops it when it ends."""
        awaited: Outcome[Any] = self.loaded
        try:
            worker = build()
            awaited.put(facts_of(worker))
            while (step := self._steps.get()) is not None and not self._is_closed.is_set():
                awaited = step.outcome
                send(pickle.dumps(step.batch))
                awaited.put(worker.run(step.batch))
        except BaseException as error:  # the caller raises it
            self.error = error
            awaited.put(None, error)
