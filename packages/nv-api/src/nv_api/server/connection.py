"""Connection: one HTTP connection, as uvicorn's protocol with bounds of ours.

Owns what is below the app: the size of a request's head, the time that it may take, offers of other
protocols, and the end of a connection. Never knows a route.
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

from nv_api.server.arrivals import Arrivals
from nv_api.server.errors import INVALID, ApiError, invalid
from nv_api.server.guard import ABORT, WRITER
from nv_api.server.listening import Listening
from nv_api.server.middleware.request_ids import HEADER, new_id
from nv_api.server.read_deadline import Part, ReadDeadline
from nv_api.server.stream_writer import StreamWriter

MAX_HEAD_BYTES = 64 << 10
"""Of a request's first line and headers. The parser joins a header's parts anew with each packet,
so its time grows with the square of the header, and all clients wait meanwhile."""
MAX_HEADERS = 256
HALF_CLOSE_SECONDS = 0.05
"""A client that ends its side so soon after its request waits for the answer, as `nc` does; one
that does so later has left. The system shows both in the same way."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: what the client has not read is dropped, also by the system."""


class Connection(HttpToolsProtocol):
    """One client's connection.

    A head above the bounds is answered with 431, a request that is not complete in time with 408,
    and then the connection is closed. The scope's state
    has a function that closes the connection at once: a client that reads nothing keeps what was
    written to it, and an orderly close would wait for it.

    Args:
        listening: has the times.
        arrivals: those of all connections.
        **options: of uvicorn's.
    """

    def __init__(
        self,
        listening: Listening,
        arrivals: Arrivals,
        **options: Any,  # noqa: ANN401  # as uvicorn's
    ) -> None:
        super().__init__(**options)
        self._arrivals = arrivals
        seconds = {Part.HEAD: listening.head_timeout, Part.BODY: listening.body_timeout}
        self._seconds = seconds
        self._deadline = ReadDeadline(seconds, self._expire)
        self._awaited: Part | None = Part.HEAD
        self._has_begun = False
        """A part of a head is there."""
        self._complete_at = 0.0
        """When the last request was complete, by the event loop's clock."""
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
        self._deadline.wait_for(Part.HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left; of several requests in a row, uvicorn notes that of the last one."""
        super().connection_lost(exc)
        self._deadline.close()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self._let_go()
        self._running, self.app_state = None, {}
        self.parser = None  # type: ignore[assignment]  # nothing comes any more
        self.cycle = None  # type: ignore[assignment]

    def on_response_complete(self) -> None:
        """A response is sent whole."""
        self._let_go()
        super().on_response_complete()

    def _let_go(self) -> None:
        """Break the circles of a request, so that it is freed at once and not by the collector.

        A full collection beside a thousand streams takes a fifth of a second.
        """
        if self._running is not None:
            for name in WRITER, ABORT:
                self._running.scope["state"].pop(name, None)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's always closes
        """The client sends nothing more; returns whether the connection stays open."""
        is_answered = self._running is None or self._running.response_complete
        if is_answered or self._awaited is Part.BODY or self.scheme == "https":
            return False
        self.cycle.keep_alive = False
        return self.loop.time() - self._complete_at < HALF_CLOSE_SECONDS

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401
        self._running = cycle
        cycle.scope["state"][WRITER] = StreamWriter(cycle)
        begin = partial(super()._start_asgi_task, cycle, app)
        if cycle.scope["method"] == "GET":  # a health check does not wait for them
            begin()
        else:
            self._arrivals.add(begin)

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
        if self._awaited is None and self.cycle.response_complete:
            self._awaited = Part.HEAD  # line ends before it, which uvicorn takes for its beginning
        self._deadline.wait_for(self._awaited)
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
        self._awaited, self._has_begun = Part.HEAD, True

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
        self._awaited, self._has_begun = Part.BODY, False
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
            self._awaited = None
            self._complete_at = self.loop.time()
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not a request, and close; in the middle of another answer, only close."""
        if self._may_answer():
            error = self._refusal or invalid("the request is not HTTP/1.1: send a valid one")
            body = orjson.dumps(error.envelope)
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (HEADER, new_id()),
                (b"connection", b"close"),
            ]
            head = b"".join(b"%s: %s\r\n" % header for header in headers)
            self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self.transport.close()

    def _may_answer(self) -> bool:
        """Whether an answer to what comes now is not in the middle of another one."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        is_read = self._awaited is Part.BODY and cycle is self._running
        return is_read and not cycle.response_started

    def _expire(self, part: Part) -> None:
        """Close the connection of a client that is too slow; not while it gets an answer."""
        if self.transport.is_closing():
            return
        running = self._running
        is_answering = running is not None and not running.response_complete
        if is_answering and (part is Part.HEAD or running is not self.cycle):
            self._deadline.wait_for(part)
        elif part is Part.HEAD and not self._has_begun:
            self.transport.close()  # nothing was asked, so nothing is answered
        else:
            self._refusal = ApiError(
                408,
                INVALID,
                f"the {part.value} of the request is not complete after {self._seconds[part]:g} s: "
                "send it faster",
                code="request_timeout",
            )
            self.send_400_response("")

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
