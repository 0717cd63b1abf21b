"""Keys: lets only clients with a key in.

Owns where a key may be, and which routes need none. Never logs or shows one.
"""

import hmac
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from nv_api.server.envelopes import error_response, path_of
from nv_api.server.errors import AUTHENTICATION, ApiError

OPEN = frozenset({"/", "/health", "/ready"})
"""Routes that need no key."""
BEARER = b"bearer "


class Keys:
    """Refuses requests without one of the keys.

    Args:
        app: the rest.
        keys: at least one.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] != "http" or path_of(scope) in OPEN:
            await self._app(scope, receive, send)
            return
        given = _given(scope)
        if given is not None and self._is_known(given):
            await self._app(scope, receive, send)
            return
        problem = "the API key is wrong" if given is not None else "the request has no API key"
        refused = ApiError(
            401,
            AUTHENTICATION,
            f"{problem}: send one as the header `Authorization: Bearer …` or `x-api-key`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await error_response(refused, scope)(scope, receive, send)

    def _is_known(self, given: bytes) -> bool:
        """Compare with every key, in a time that does not depend on how much of one fits."""
        digest = _digest(given)
        return any([hmac.compare_digest(digest, known) for known in self._digests])  # noqa: C419


def _digest(key: bytes) -> bytes:
    """All of one length, so that a comparison does not show a key's length."""
    return sha256(key).digest()


def _given(scope: Scope) -> bytes | None:
    """The key that a request has; None if it has none."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    bearer = headers.get(b"authorization", b"")
    if bearer[: len(BEARER)].lower() == BEARER:
        return bearer[len(BEARER) :].strip()
    return headers.get(b"x-api-key")
