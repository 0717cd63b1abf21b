"""ReadDeadline: until when a part of a request must have come.

Owns the timer. Never reads, and never closes a connection.
"""

import asyncio
from collections.abc import Callable, Mapping
from enum import Enum


class Part(Enum):
    """A part of a request that the server waits for."""

    HEAD = "head"
    BODY = "body"


class ReadDeadline:
    """One connection's wait for its client.

    Args:
        seconds: longest wait for each part.
        expire: called when it is over; the part is not awaited any more.
    """

    def __init__(self, seconds: Mapping[Part, float], expire: Callable[[Part], None]) -> None:
        self._seconds = seconds
        self._expire = expire
        self._part: Part | None = None
        self._timer: asyncio.TimerHandle | None = None

    def wait_for(self, part: Part | None) -> None:
        """Wait for a part from now on, or if that is awaited already, go on; None: for nothing."""
        if part is self._part:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._part = part
        if part is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._seconds[part], self._end, part)

    def close(self) -> None:
        """Wait for nothing more, and hold nothing."""
        self.wait_for(None)
        self._expire = lambda _: None

    def _end(self, part: Part) -> None:
        self._part = self._timer = None
        self._expire(part)
