"""RequestStream: one request in flight, for the task that reads it.

Owns the wait of its reader for news. Never makes text (the completions do); never calls the engine.
"""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeAlias

from nv_api.outputs import CompletionOutput
from nv_api.request import Request

TakeDeltas: TypeAlias = Callable[[list[CompletionOutput]], Awaitable[object] | None]
"""Gets what is new of each completion that has news. Returns something to await if it can take
nothing more before that."""


class EngineDead(RuntimeError):
    """The engine runs nothing more: its process or its device is lost, or it is closed."""


class RequestStream:
    """One request in flight: iterate to read what is new, or have it handed on.

    Nothing is buffered but the completions themselves: a slow reader gets several tokens in one
    delta. Use it as an async context manager, so that a task that is cancelled aborts the request.

    Attributes:
        request: the completions, and the request as users see it (`request.output()`).
    """

    def __init__(self, request: Request, abort: Callable[[], None]) -> None:
        self.request = request
        self._abort = abort
        self._running = list(request.completions)
        self._news: asyncio.Future[None] | None = None
        self._take: TakeDeltas | None = None
        self._busy: asyncio.Future[Awaitable[object] | None] | None = None
        """While deltas are handed on: set once they cannot be, at the latest at the end."""
        self._error: Exception | None = None

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> list[CompletionOutput]:
        """The deltas since the last call, one per completion that has news.

        Raises:
            EngineDead: the engine is gone, and everything that it gave has been read.
            RuntimeError: the tokenizer cannot make the text.
        """
        while not (deltas := self._deltas()):
            if self._error is not None:
                raise self._error
            if not self._running:
                raise StopAsyncIteration
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return deltas

    async def hand_on(self, take: TakeDeltas) -> None:
        """Call `take` with the deltas of every step, until the request has ended.

        It is called where the step arrives, without a switch to the reader's task: for a token,
        such a switch costs more than all the rest.

        Raises:
            EngineDead, RuntimeError: as `__anext__`.
            Exception: what `take` raises.
        """
        self._take = take
        try:
            while True:
                self._busy = asyncio.get_running_loop().create_future()
                self._hand_on()
                room = await self._busy
                if room is not None:
                    await room
                elif self._error is not None:
                    raise self._error
                else:
                    return
        finally:
            self._take = None  # it may hold this stream

    def abort(self) -> None:
        """End the request; its completions end with finish_reason "abort"."""
        if not self.request.finished:
            self._abort()
            self.wake()

    def wake(self) -> None:
        """Tell the reader that there may be news."""
        if self._busy is not None:
            if not self._busy.done():
                self._hand_on()
        elif self._news is not None and not self._news.done():
            self._news.set_result(None)

    def fail(self, error: Exception) -> None:
        """Raise this in the reader once it has read what there is."""
        self._error = error
        self.wake()

    def close(self) -> None:
        """Return no further deltas."""
        self._running.clear()

    async def __aenter__(self) -> "RequestStream":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def _hand_on(self) -> None:
        """Hand on what is new; if that was the last, or nothing more can be taken, end the wait."""
        assert self._busy is not None
        assert self._take is not None
        room = None
        try:
            if deltas := self._deltas():
                room = self._take(deltas)
        except Exception as error:  # of one request: the step goes on for the others
            self._error = error
        if room is None and self._error is None and self._running:
            return  # nearly always
        if not self._busy.done():  # else the taker has ended the request, which did it
            self._busy.set_result(room)

    def _deltas(self) -> list[CompletionOutput]:
        running = self._running
        if len(running) == 1:  # nearly always; without the frame of a comprehension
            if not running[0].has_news:
                return []
            deltas = [running[0].delta()]
        else:
            deltas = [each.delta() for each in running if each.has_news]
        for delta in deltas:
            if delta.finish_reason is not None:
                self._running.remove(self.request.completions[delta.index])
        return deltas
