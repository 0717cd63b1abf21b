"""HostClient: the front end's end of the socket, in an event loop.

Owns the ids of requests and calls, and the frames on their way. Never makes text.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

from nv_engine import EngineRequest

from nv_api.host.frames import FROM_HOST, Abort, FrameBuffer, FromHost, ToHost, add_of, packed

TURN_BYTES = 16 << 10
"""Of frames that are handed on in one turn of the loop; the updates of 256 sequences have 4 kB, and
take a thousandth of a second."""
FRAME_BYTES = 1000
"""How much more a frame counts: its work grows with its bytes only if it is long. One that accepts
a request wakes a task, which takes a fifth of a thousandth of a second."""


class HostClient(asyncio.Protocol):
    """Sends requests to a host, and hands on what comes back.

    Args:
        receive: gets each frame, on the loop.
        end: called once when the connection is gone.
    """

    def __init__(self, receive: Callable[[FromHost], None], end: Callable[[], None]) -> None:
        self._receive = receive
        self._end = end
        self._received = FrameBuffer()
        self._waiting: deque[bytes] = deque()
        """Bodies of whole frames that are not handed on yet."""
        self._transport: asyncio.Transport | None = None
        self._next_id = 0

    async def connect(self, end: socket.socket) -> None:
        """Use this end of a socket pair from now on."""
        await asyncio.get_running_loop().create_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way out."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is of no such class

    def data_received(self, data: bytes) -> None:
        """Hand on the frames that are whole, some in each turn of the loop."""
        is_idle = not self._waiting
        self._waiting += self._received.push(data)
        if is_idle:
            self._hand_on()

    def _hand_on(self) -> None:
        """Hand on as many frames as come in a common step, and at least one."""
        room = TURN_BYTES
        try:
            while self._waiting and room > 0:
                body = self._waiting.popleft()
                room -= len(body) + FRAME_BYTES
                self._receive(FROM_HOST.decode(body))
        finally:
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._hand_on)

    def connection_lost(self, exc: Exception | None) -> None:
        """The host is gone, or this end was closed."""
        while self._waiting:
            self._receive(FROM_HOST.decode(self._waiting.popleft()))
        self._transport = None
        self._end()

    def forget(self) -> None:
        """Drop the connection of a loop that is closed, whose transport cannot close it."""
        self._transport = None

    def send(self, frame: ToHost) -> None:
        """Send a frame; to a host that is gone, nothing."""
        if self._transport is not None:
            self._transport.write(packed(frame))

    def add_list(self, requests: Iterable[EngineRequest], *, plain: bool) -> list[int]:
        """Send requests, all or none; whether each is accepted comes later. Returns their ids.

        Raises:
            ValueError: a request that cannot travel.
        """
        assert plain, "ids travel as plain ints"
        requests = list(requests)
        ids = range(self._next_id, self._next_id + len(requests))
        try:
            frames = [
                packed(add_of(each, number)) for each, number in zip(requests, ids, strict=True)
            ]
        except OverflowError:
            raise ValueError(
                "an integer of the request needs more than 64 bits: token ids are below the "
                "size of the vocabulary"
            ) from None
        self._next_id = ids.stop
        if self._transport is not None:
            self._transport.write(b"".join(frames))
        return list(ids)

    def new_id(self) -> int:
        """An id for a call that is not a request."""
        self._next_id += 1
        return self._next_id - 1

    def abort(self, request_id: int, index: int | None = None) -> None:
        """End a request, or one of its completions."""
        self.send(Abort(request_id, index))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()
