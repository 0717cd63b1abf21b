"""ExitGate: at the interpreter's end, a thread that still steps an engine stops between two steps.

Python ends daemon threads when they next ask for its lock. In the middle of a step that is below
frames of C++, which then abort the process. Owns the wait for the end of the step.
"""

import threading
import time

MAX_SECONDS = 30.0
"""Longest wait for the end of a step."""
POLL_SECONDS = 0.01


class ExitGate:
    """One per session.

    Args:
        turn: held by the thread that steps the engine.
    """

    def __init__(self, turn: "threading.RLock") -> None:
        self._turn = turn
        self._is_closed = False
        self._stopped = threading.Event()

    def go_through(self) -> None:
        """Return at once; once the gate is closed, only in the main thread, which Python waits for.

        An `atexit` handler of the program may still generate there.
        """
        if self._is_closed and threading.current_thread() is not threading.main_thread():
            self._stopped.set()
            threading.Event().wait()

    def close(self) -> None:
        """Let no thread begin a step, and wait until none is in one."""
        self._is_closed = True
        last = time.monotonic() + MAX_SECONDS
        while not self._stopped.is_set() and time.monotonic() < last:
            if self._turn.acquire(blocking=False):
                self._turn.release()
                return
            time.sleep(POLL_SECONDS)
