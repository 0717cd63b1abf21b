"""Departures: cancels the work for a client that has left.

Owns the task that listens for the end of a connection. Never closes one.
"""

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Departures:
    """Raises CancelledError in the request's task when its client leaves, at any moment.

    Listening begins once the body is read, so a request without a body is not watched.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the rest; if the client leaves, end it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = _Client(receive, send)
        try:
            await self._app(scope, client.receive, client.send)
        except asyncio.CancelledError:
            if not client.has_left or client.task.uncancel() > 0:
                raise
        finally:
            client.stop_listening()


class _Client:
    """One client, as the app sees it."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._listening: asyncio.Task[None] | None = None
        self._is_answered = False
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.has_left = False

    async def receive(self) -> Message:
        """The next part of the body."""
        if self._listening is not None:
            await self._listening  # the app listens for the end too: it is cancelled there
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._listening = asyncio.create_task(self._listen())
        return message

    async def send(self, message: Any) -> None:  # noqa: ANN401
        """Send a part of the response."""
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_answered = True  # the end of the connection means nothing after this
        await self._send(message)

    def stop_listening(self) -> None:
        """The request is over."""
        if self._listening is not None:
            self._listening.cancel()
            self._listening = None  # its error would keep this client, and so itself

    async def _listen(self) -> None:
        message: Message = {"type": "http.request"}
        while message["type"] != "http.disconnect":
            message = await self._receive()
        if not self._is_answered:
            self.has_left = True
            self.task.cancel()
