"""Connection: one HTTP connection, as uvicorn's protocol with bounds of ours.

Owns what is below the app: the size of a request's head, offers of other protocols, and the end of
a connection. Never knows a route.
"""

import asyncio
import socket
import struct
from functools import partial
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from nv_api.server.errors import INVALID, ApiError, invalid
from nv_api.server.guard import ABORT, WRITER
from nv_api.server.stream_writer import StreamWriter

MAX_HEAD_BYTES = 64 << 10
"""Of a request's first line and headers. The parser joins a header's parts anew with each packet,
so its time grows with the square of the header, and all clients wait meanwhile."""
MAX_HEADERS = 256
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: what the client has not read is dropped, also by the system."""


class Connection(HttpToolsProtocol):
    """One client's connection.

    A head above the bounds is answered with 431, and the connection is closed. The scope's state
    has a function that closes the connection at once: a client that reads nothing keeps what was
    written to it, and an orderly close would wait for it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # as uvicorn's
        super().__init__(*args, **kwargs)
        self._num_loose_bytes = 0
        """Received since the last complete head, part of a body, or message."""
        self._num_head_bytes = 0
        self._has_offer = False
        self._running: RequestResponseCycle | None = None
        self._refusal: ApiError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, ABORT: partial(_reset, transport)}

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left; of several requests in a row, uvicorn notes that of the last one."""
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401
        self._running = cycle
        cycle.scope["state"][WRITER] = StreamWriter(cycle)
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        """Parse a packet; refuse a head, a chunk's size or a trailer that does not end."""
        self._unset_keepalive_if_required()
        self._num_loose_bytes += len(data)
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("")
            return
        if self._num_loose_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refusal = _large_head(f"more than {MAX_HEAD_BYTES} bytes")
            self.send_400_response("")

    def _parse(self, data: memoryview) -> None:
        """Parse bytes. An offer of another protocol is ignored (RFC 9110, 7.8).

        httptools takes the bytes after such a head for the other protocol's, so the same head
        without the offer goes to a new parser, and then the bytes after it.
        """
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as pause:
                if not self._has_offer:  # CONNECT, which has no body
                    return
                data = data[pause.args[0] :]
                head = self._head_without_offer()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
                self.parser.feed_data(head)
            else:
                return

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._num_head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A part of the first line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a field of a trailer."""
        self._count(len(name) + len(value) + len(": \r\n"))
        if len(self.headers) == MAX_HEADERS:
            self._refuse(_large_head(f"more than {MAX_HEADERS} headers"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._num_loose_bytes = 0
        self._has_offer = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if not self._has_offer:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._num_loose_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._num_loose_bytes = 0
        if not self._has_offer:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not a request, and close; in the middle of another answer, only close."""
        if self.cycle is None or self.cycle.response_complete:
            error = self._refusal or invalid("the request is not HTTP/1.1: send a valid one")
            body = orjson.dumps(error.envelope)
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            head = b"".join(b"%s: %s\r\n" % header for header in headers)
            self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self.transport.close()

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(_large_head(f"more than {MAX_HEAD_BYTES} bytes"))

    def _refuse(self, error: ApiError) -> None:
        """End the parser's work; `data_received` then sends the error."""
        self._refusal = error
        raise error


def _large_head(size: str) -> ApiError:
    message = f"the head of the request has {size}: send fewer or shorter headers"
    return ApiError(431, INVALID, message, code="headers_too_large")


def _reset(transport: asyncio.Transport) -> None:
    """Close a connection at once; its client gets a reset."""
    if (sock := transport.get_extra_info("socket")) is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    transport.abort()
