"""Interrupts: Ctrl-C waits until a step is complete.

Owns when SIGINT becomes a KeyboardInterrupt while the engine steps: after the step's tokens have
reached their requests, so that other calls' requests lose nothing. A second Ctrl-C does not wait.
Never replaces a handler that the program installed itself.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def whole_step() -> Iterator[None]:
    """Raise KeyboardInterrupt after the block, if Ctrl-C came inside it.

    Outside the main thread, or under another SIGINT handler than Python's own, nothing changes.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    seen: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if seen:
        raise KeyboardInterrupt
