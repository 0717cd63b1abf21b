"""CollectorPause: keeps Python's cycle collector from visiting a process's old objects.

A full collection visits every object of torch, transformers and the model's modules, about 200,000
of them. It takes about 0.1 s, in which no step is scheduled. Between the start of a list of prompts
and its first step the collector does not run at all: the list makes thousands of objects, none of
them garbage. From the first step to the end it visits only the objects made since then.

Owns the pause. Never collects.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class CollectorPause:
    """Stops the collector from `begin` to the first `narrow`; `end` restores its earlier state."""

    def __init__(self) -> None:
        self._was_enabled = False
        self._froze = False

    def begin(self) -> None:
        """Stop the collector."""
        self._was_enabled = gc.isenabled()
        gc.disable()

    def narrow(self) -> None:
        """Start it again, if it ran before, for objects made from now on; a second call: nothing.

        If the program has frozen objects of its own, nothing more is frozen: `end` could not tell
        them from ours.
        """
        if self._was_enabled and gc.get_freeze_count() == 0:
            self._froze = True
            gc.freeze()
        self._resume()

    def end(self) -> None:
        """Let the collector be as it was before `begin`; a second call does nothing."""
        self._resume()
        if self._froze:
            gc.unfreeze()
            self._froze = False

    def _resume(self) -> None:
        if self._was_enabled:
            gc.enable()
            self._was_enabled = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Stop the collector for a block that makes many objects and little garbage, as a start."""
    pause = CollectorPause()
    pause.begin()
    try:
        yield
    finally:
        pause.end()
