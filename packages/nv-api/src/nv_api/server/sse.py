"""EventStream: server-sent events, written straight to the ASGI server.

Owns the order of a stream: status and headers, then events. Never makes an event.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.types import Send

from nv_api.server.stream_writer import StreamWriter

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(value: object) -> bytes:
    """One event: its JSON has no line end."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def named_event(name: str, value: object) -> bytes:
    """One event that has a name besides its JSON."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps(value))


class EventStream:
    """One response.

    Args:
        send: of ASGI.
        headers: more than every stream has.
        writer: writes past ASGI; None: the server is not ours.
    """

    def __init__(
        self, send: Send, headers: list[tuple[bytes, bytes]], writer: StreamWriter | None
    ) -> None:
        self._send = send
        self._headers = [*HEADERS, *headers]
        self._writer = writer or _Sender(send)
        self.write: Callable[[bytes], Awaitable[None] | None] = self._writer.write
        """Send events; await what it returns before the next, until when the buffer is full."""

    async def begin(self) -> None:
        """Send status and headers."""
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})

    async def end(self, events: bytes) -> None:
        """Send the last events and end the stream."""
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def ping(self, seconds: float) -> Any:  # noqa: ANN401  # never returns
        """Write a comment whenever nothing else was written for so long."""
        seen = -1
        while True:
            if seen == self._writer.num_writes and (room := self.write(PING)) is not None:
                await room
            seen = self._writer.num_writes
            await asyncio.sleep(seconds)


class _Sender:
    """As StreamWriter, with the ASGI `send` of a server that is not ours."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.num_writes = 0

    def write(self, part: bytes) -> Awaitable[None]:
        """Write a part; await what it returns before the next."""
        self.num_writes += 1
        return self._send({"type": "http.response.body", "body": part, "more_body": True})
