"""Call: one request to an ASGI app of the same process.

Owns the app's view of a client, which never leaves and reads at once.
"""

import asyncio
from typing import Any, NamedTuple

import orjson
from starlette.types import ASGIApp, Message, Scope


class Reply(NamedTuple):
    """A whole response."""

    status: int
    request_id: str | None
    body: bytes


async def call(app: ASGIApp, path: str, body: dict[str, Any]) -> Reply:
    """POST a JSON object to an app; a fault of the app is a response too."""
    content = orjson.dumps(body)
    incoming: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
    outgoing: list[Any] = []

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(message: Any) -> None:  # noqa: ANN401  # of ASGI
        outgoing.append(message)

    # The app cancels the task of a request, so each has a task of its own.
    (fault,) = await asyncio.gather(
        app(_scope(path, content), receive, send), return_exceptions=True
    )
    if not outgoing:
        assert fault is not None
        raise fault
    start, *parts = outgoing
    headers = dict(start["headers"])
    return Reply(
        start["status"],
        headers.get(b"x-request-id", b"").decode() or None,
        b"".join(part.get("body", b"") for part in parts),
    )


def _scope(path: str, content: bytes) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
        ],
        "client": None,
        "server": None,
        "state": {},
    }
