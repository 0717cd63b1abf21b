"""RequestStream: one request in flight, for the task that reads it.

Owns the wait of its reader for news. Never makes text (the completions do); never calls the engine.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType

from nv_api.outputs import CompletionOutput
from nv_api.request import Request


class EngineDead(RuntimeError):
    """The engine runs nothing more: its process or its device is lost, or it is closed."""


class RequestStream:
    """One request in flight: iterate to read what is new.

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

    def abort(self) -> None:
        """End the request; its completions end with finish_reason "abort"."""
        if not self.request.finished:
            self._abort()
            self.wake()

    def wake(self) -> None:
        """Tell the reader that there may be news."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def fail(self, error: Exception) -> None:
        """Raise this in the reader once it has read what there is."""
        self._error = error
        self.wake()

    def close(self) -> None:
        """Give no deltas any more."""
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

    def _deltas(self) -> list[CompletionOutput]:
        deltas = []
        for completion in tuple(self._running):
            if not completion.has_news:
                continue
            delta = completion.delta()
            if delta.finish_reason is not None:
                self._running.remove(completion)
            deltas.append(delta)
        return deltas
