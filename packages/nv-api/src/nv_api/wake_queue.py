"""WakeQueue: wakes the readers of a step's requests, some in each turn of the event loop.

Owns their order. Never makes a delta: a stream does, when it is woken.
"""

import asyncio
from collections.abc import Iterable
from itertools import islice

from nv_api.request_stream import RequestStream

NUM_PER_TURN = 128
"""A stream whose deltas are handed on takes some 10 microseconds: other work of the loop waits for
a thousandth of a second at most."""


class WakeQueue:
    """Streams that have news."""

    def __init__(self) -> None:
        self._streams: dict[RequestStream, None] = {}

    def add(self, streams: Iterable[RequestStream]) -> None:
        """Wake the streams in the next turns.

        A stream that still waits from an earlier step keeps its place, and is woken once: if steps
        come faster than readers take them, their tokens merge.
        """
        is_idle = not self._streams
        self._streams.update(dict.fromkeys(streams))
        if is_idle and self._streams:
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        try:
            for stream in tuple(islice(self._streams, NUM_PER_TURN)):
                del self._streams[stream]
                stream.wake()
        finally:  # an error is of one stream: the others are woken in the next turn
            if self._streams:
                asyncio.get_running_loop().call_soon(self._wake)
