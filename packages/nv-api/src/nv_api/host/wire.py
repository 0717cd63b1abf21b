"""Wire: the host's end of the socket.

Owns the bytes in both directions. Never waits for a front end that does not read: what it has not
taken yet is kept and sent later.
"""

import select
import socket
import threading
from contextlib import suppress

from nv_api.host.frames import FOR_HOST, FrameBuffer, FromHost, ToHost, packed

RECEIVE_BYTES = 1 << 20
SEND_BUFFER = 1 << 22
"""Asked of the system for each direction."""


class Wire:
    """Frames to and from a front end.

    Args:
        end: one end of a socket pair.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, SEND_BUFFER)
        self._end = end
        self._received = FrameBuffer()
        self._unsent = bytearray()
        self._is_sending = threading.Lock()  # a record of the log may come from any thread
        self._bell, self._button = socket.socketpair()
        for each in (self._bell, self._button):
            each.setblocking(False)
        self._readable = select.poll()  # between two steps this takes a third of `select`'s time
        for each in (self._end, self._bell):
            self._readable.register(each, select.POLLIN)
        self.is_open = True
        """False once the front end has closed its end, or is gone."""

    def ring(self) -> None:
        """End a `receive` that waits; may be called from another thread."""
        with suppress(OSError):  # it rings already, or is closed
            self._button.send(b"\0")

    def receive(self, seconds: float) -> list[ToHost]:
        """The frames that have come; waits at most `seconds` for the first."""
        if not (seconds or self._unsent or self._readable.poll(0)):
            return []
        writing = [self._end] if self._unsent else []
        readable, writable, _ = select.select([self._end, self._bell], writing, [], seconds)
        if writable:
            self._flush()
        if self._bell in readable:
            self._bell.recv(RECEIVE_BYTES)
        if self._end not in readable:
            return []
        frames: list[ToHost] = []
        try:
            while received := self._end.recv(RECEIVE_BYTES):
                frames += map(FOR_HOST.decode, self._received.push(received))
                if len(received) < RECEIVE_BYTES:
                    return frames
            self.is_open = False
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        return frames

    def send(self, frame: FromHost) -> None:
        """Send a frame, now or as soon as there is room."""
        body = packed(frame)
        with self._is_sending:
            if not self._unsent:
                body = body[self._sent(body) :]  # nearly always empty
            self._unsent += body

    def drain(self, seconds: float) -> None:
        """Wait until everything is sent, at most so long for each part."""
        while self._unsent and self.is_open:
            if not select.select([], [self._end], [], seconds)[1]:
                return
            self._flush()

    def close(self) -> None:
        """Close this end."""
        self.is_open = False
        for each in (self._end, self._bell, self._button):
            each.close()

    def _flush(self) -> None:
        with self._is_sending:
            while self._unsent and (num_bytes := self._sent(self._unsent)):
                del self._unsent[:num_bytes]

    def _sent(self, part: bytes | bytearray) -> int:
        """Send what there is room for; returns the bytes that need not be sent any more."""
        try:
            return self._end.send(part)
        except BlockingIOError:
            return 0
        except OSError:
            self.is_open = False
            return len(part)
