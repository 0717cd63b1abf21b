"""StreamWriter: parts of a streamed response, written to the connection from any callback.

ASGI's `send` is a coroutine under half a dozen others, one of each middleware. For an event of one
token they would cost as much as the event, and the events of a stream need nothing of them. Status
and headers, and the end of the response, go through `send`.

Owns the form of a part: a chunk of HTTP/1.1. Never waits.
"""

from collections.abc import Awaitable, Callable
from typing import Any

Drain = Callable[[], Awaitable[None]]
"""Returns once the client has read."""


class StreamWriter:
    """Writes the parts of one response between its headers and its end.

    Args:
        cycle: uvicorn's state of the request.
        drain: waits until the client has read.
    """

    def __init__(self, cycle: Any, drain: Drain | None = None) -> None:  # noqa: ANN401
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write
        self._drain = drain or cycle.flow.drain
        self.num_writes = 0
        """Parts that were written."""

    def watched(self, watch: Callable[[Drain], Drain]) -> "StreamWriter":
        """The same, whose waits are watched."""
        return StreamWriter(self._cycle, watch(self._drain))

    def write(self, part: bytes) -> Awaitable[None] | None:
        """Write a part that is not empty.

        Returns:
            Something to await before the next part if the client does not read; otherwise None.
        """
        self.num_writes += 1
        if self._cycle.disconnected:
            return None
        self._write(b"%x\r\n%b\r\n" % (len(part), part))
        return self._drain() if self._flow.write_paused else None
