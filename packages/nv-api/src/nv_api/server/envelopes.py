"""Envelopes: an error as a response, in the form that clients of its path read.

Owns which paths have Anthropic's form, and its types of errors.
"""

from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Scope

from nv_api.server.errors import ApiError

MESSAGES = "/v1/messages"
"""This path, and all below it, have Anthropic's form."""
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Anthropic's type of an error, by its status; others are "invalid_request_error"."""


def path_of(scope: Scope) -> str:
    """A request's path below the root path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request's path has Anthropic's form."""
    path = path_of(scope)
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def error_response(error: ApiError, scope: Scope) -> Response:
    """An error as the response to a request."""
    envelope = error.envelope
    if speaks_anthropic(scope):
        envelope = anthropic_envelope(error, scope["state"]["request_id"])
    return Response(
        orjson.dumps(envelope), error.status, error.headers, media_type="application/json"
    )


def anthropic_envelope(error: ApiError, request_id: str) -> dict[str, Any]:
    """An error in Anthropic's form."""
    kind = TYPES.get(error.status, "invalid_request_error")
    if error.code == "timeout":
        kind = "timeout_error"
    message = error.message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }
