"""RequestIds: gives each request an id, which its response has as `x-request-id`.

Owns which ids of clients are kept. Never uses one as a key: two requests may have the same.
"""

import re
from random import getrandbits
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from nv_api.server.envelopes import speaks_anthropic

HEADER = b"x-request-id"
ANTHROPIC_HEADER = b"request-id"
"""On Anthropic's routes, responses have the id under this name too."""
_KEPT = re.compile(rb"[\w.:@/+=-]{1,128}", re.ASCII)


def id_headers(scope: Scope) -> tuple[bytes, ...]:
    """The names under which a response has the request's id."""
    return (HEADER, ANTHROPIC_HEADER) if speaks_anthropic(scope) else (HEADER,)


def new_id() -> bytes:
    """A new id. It need not be secret, so it is not a uuid4, which takes 50 times as long."""
    return b"%032x" % getrandbits(128)


class RequestIds:
    """Puts `request_id` into the scope's state, and into the response's headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take the client's id if it is short and plain, else a new one."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        kept = given if _KEPT.fullmatch(given) else new_id()
        scope.setdefault("state", {})["request_id"] = kept.decode()
        names = id_headers(scope)

        async def named(message: Any) -> None:  # noqa: ANN401
            if message["type"] == "http.response.start":
                more = [(name, kept) for name in names]
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        await self._app(scope, receive, named)
