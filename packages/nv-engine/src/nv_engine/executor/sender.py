"""Sender: the thread that sends batches to every rank, in order of submission.

Owns that thread. On a thread of its own a batch always goes to all ranks, or to none: a Ctrl-C that
hits the caller cannot leave one rank waiting in a sum for another that was never asked.
"""

import pickle
import threading
from collections.abc import Callable
from queue import SimpleQueue

from nv_engine.batch import Batch


class QueuedStep:
    """A step that was queued for every rank.

    Attributes:
        number: which step of the ranks it is, from 1; 0 until it is sent. The thread that sends
            counts, because a Ctrl-C could come between a count and the queue.
    """

    number = 0


class Sender:
    """Sends batches until an error, after which the ranks may no longer be at the same step."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        """Begin; `send` gives every rank a message."""
        self.error: BaseException | None = None
        """The error that ended the thread, if one did."""
        self._queue: SimpleQueue[tuple[Batch, QueuedStep] | None] = SimpleQueue()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, args=(send,), name="nv_engine sender", daemon=True
        )
        self._thread.start()

    def submit(self, batch: Batch) -> QueuedStep:
        """Queue a batch."""
        step = QueuedStep()
        self._queue.put((batch, step))
        return step

    def close(self, timeout: float) -> bool:
        """Send nothing more; True if the thread ended within `timeout` seconds."""
        self._is_closed.set()
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _serve(self, send: Callable[[bytes], None]) -> None:
        num_steps = 0
        try:
            while (queued := self._queue.get()) is not None and not self._is_closed.is_set():
                batch, step = queued
                num_steps += 1
                step.number = num_steps
                send(pickle.dumps(batch))
        except BaseException as error:  # the executor raises it in the caller's thread
            self.error = error
