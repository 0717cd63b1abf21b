"""Guard: ends one request early, for a reason of the server's.

Owns the two deadlines of a request: its end, and each write to its client. Never knows what the
request does.
"""

import asyncio
from types import TracebackType
from typing import Any

from starlette.types import Scope, Send

from nv_api.server.errors import ApiError, unavailable
from nv_api.server.lifecycle import Lifecycle
from nv_api.server.options import ServeOptions
from nv_api.server.stream_writer import Drain, StreamWriter

ABORT = "abort_connection"
"""Where the scope's state has a function that closes the connection at once (`connection.py`)."""
WRITER = "stream_writer"
"""Where it has a StreamWriter of the response."""


class Guard:
    """Watches the task that makes one request's response.

    `async with guard:` around the work; an interruption raises CancelledError inside. Then `reason`
    is the error to send, and `is_deaf` is true if the client does not read.
    """

    def __init__(self, options: ServeOptions, lifecycle: Lifecycle, scope: Scope) -> None:
        self._options = options
        self._lifecycle = lifecycle
        self._scope = scope
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._timers: list[asyncio.TimerHandle] = []
        self._writing_since: float | None = None
        self._send: Send | None = None
        self.reason: ApiError | None = None
        self.is_deaf = False

    def __enter__(self) -> "Guard":
        self._lifecycle.guards.add(self)
        seconds = self._options.request_timeout
        late = unavailable(f"the request has not ended within {seconds:g} s", "timeout")
        self._timers = [
            self._loop.call_later(seconds, self.interrupt, late),
            self._loop.call_later(self._options.write_timeout, self._check_writing),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lifecycle.guards.discard(self)
        for timer in self._timers:
            timer.cancel()

    def interrupt(self, reason: ApiError) -> None:
        """Raise CancelledError in the request's task; a second reason changes nothing."""
        if self.reason is None and self._task is not None:
            self.reason = reason
            self._task.cancel()

    def take_back(self) -> ApiError:
        """Go on after an interruption: the task is not cancelled any more. Returns the reason.

        Raises:
            CancelledError: the task was cancelled by something else.
        """
        if self.reason is None or self._task is None or self._task.uncancel() > 0:
            raise asyncio.CancelledError
        return self.reason

    def watched(self, send: Send) -> Send:
        """The same `send`, with the write deadline."""
        self._send = send

        async def write(message: Any) -> None:  # noqa: ANN401
            self._writing_since = self._loop.time()
            await send(message)
            self._writing_since = None

        return write

    @property
    def writer(self) -> StreamWriter | None:
        """The connection's writer, with the write deadline; None: the server is not ours."""
        writer = self._scope.get("state", {}).get(WRITER)
        return None if writer is None else writer.watched(self._watched_wait)

    def _watched_wait(self, drain: Drain) -> Drain:
        async def wait() -> None:
            self._writing_since = self._loop.time()
            await drain()
            self._writing_since = None

        return wait

    async def hang_up(self) -> None:
        """Close the connection without waiting for what the client has not read."""
        abort = self._scope.get("state", {}).get(ABORT)
        if abort is not None and self._send is not None:
            abort()
            # returns once the connection is gone; a response without an end is an error in the log
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _check_writing(self) -> None:
        """Interrupt a write that takes too long; otherwise look again later."""
        seconds = self._options.write_timeout
        since = self._writing_since
        waited = 0.0 if since is None else self._loop.time() - since
        if waited >= seconds:
            self.is_deaf = True
            self.interrupt(unavailable(f"the client has read nothing for {seconds:g} s", "timeout"))
        else:
            self._timers[1] = self._loop.call_later(seconds - waited, self._check_writing)
