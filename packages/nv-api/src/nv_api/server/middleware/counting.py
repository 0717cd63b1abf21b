"""Counting: counts responses by route and status.

Owns which route a request counts for. Never uses a path as a label: clients choose those.
"""

from collections import Counter
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send


class Counting:
    """Counts into a counter of (route, status).

    Args:
        app: the rest.
        responses: counts each response that has begun.
    """

    def __init__(self, app: ASGIApp, responses: Counter[tuple[str, int]]) -> None:
        self._app = app
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a response when its status is sent."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Any) -> None:  # noqa: ANN401
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self._responses[route, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counted)
