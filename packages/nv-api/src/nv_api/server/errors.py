"""Errors of the server: what a client gets in place of an answer.

Owns the envelope `{"error": {message, type, param, code}}`, and the status of each kind of error.
Never logs one, and never makes a response (`envelopes.py`).
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nv_api.prompts import PromptTooLong

if TYPE_CHECKING:
    from nv_api.server.llm import ServedLLM

INVALID, AUTHENTICATION, RATE, UNAVAILABLE, SERVER = (
    "invalid_request_error",
    "authentication_error",
    "rate_limit_error",
    "unavailable",
    "server_error",
)
"""Types of errors."""
NO_ROOM = "context_length_exceeded"
"""The code of a prompt that is longer than the context."""
RETRY_SECONDS = 1
"""Of the header Retry-After."""
_FIRST_WORD = re.compile(r"(?:prompt \d+: )?(?:the longest entry of )?([a-z_]+)(?:\b|\[)")


class ApiError(Exception):
    """An error that a client gets.

    Args:
        status: of HTTP.
        kind: the envelope's `type`.
        message: one sentence; it names the value, the bound and the fix.
        param: the field of the request that is wrong; None if it is not one field.
        code: a word for programs; None if there is none.
        headers: more headers of the response.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def envelope(self) -> dict[str, Any]:
        """The body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """The same error for a client that knows fields by other names."""
        first, dot, rest = (self.param or "").partition(".")
        new = names.get(first)
        if new is None:
            return self
        message = self.message
        if message.startswith(first):
            message = new + message.removeprefix(first)
        return ApiError(
            self.status,
            self.kind,
            message,
            param=new + dot + rest,
            code=self.code,
            headers=self.headers,
        )


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that is wrong."""
    return ApiError(400, INVALID, message, param=param, code=code)


def unsupported(message: str, param: str | None = None) -> ApiError:
    """A request for something that this server does not have."""
    return invalid(message, param, "unsupported")


def unavailable(message: str, code: str) -> ApiError:
    """The server cannot run a request now."""
    headers = {"retry-after": str(RETRY_SECONDS)}
    return ApiError(503, UNAVAILABLE, message, code=code, headers=headers)


def lost(reason: str) -> ApiError:
    """The engine is lost, and no request can run any more."""
    return unavailable(f"the engine is lost: {reason}", "engine_dead")


@contextmanager
def losses(llm: "ServedLLM") -> Iterator[None]:
    """Make a RuntimeError into a 503 if the engine is lost; another stays as it is."""
    try:
        yield
    except RuntimeError as error:
        if llm.loss is None:
            raise
        raise lost(llm.loss) from error


def too_many(message: str) -> ApiError:
    """The queue is full."""
    headers = {"retry-after": str(RETRY_SECONDS)}
    return ApiError(429, RATE, message, code="queue_full", headers=headers)


def failed(message: str) -> ApiError:
    """The server failed."""
    return ApiError(500, SERVER, message, code="engine_error")


@contextmanager
def refusals(param: str | None = None) -> Iterator[None]:
    """Make errors that the engine's or the text's checks raise into 400s.

    Args:
        param: the field that is wrong, if the sentence does not begin with a field's name.
    """
    try:
        yield
    except NotImplementedError as error:
        raise unsupported(str(error), _field_of(str(error), param)) from error
    except PromptTooLong as error:
        raise invalid(str(error), param, NO_ROOM) from error
    except (ValueError, TypeError, ImportError, FileNotFoundError) as error:
        raise invalid(str(error), _field_of(str(error), param)) from error


def _field_of(sentence: str, otherwise: str | None) -> str | None:
    """The field whose name begins an error's sentence."""
    found = _FIRST_WORD.match(sentence)
    name = found[1] if found else ""
    return name if "_" in name or name in _SHORT_NAMES else otherwise


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Name the fields of errors as another dialect does.

    Args:
        names: a field's name there, by its name in /v1/chat/completions.
    """
    try:
        yield
    except ApiError as error:
        raise error.renamed(names) from error


_SHORT_NAMES = frozenset(
    {"n", "temperature", "seed", "stop", "logprobs", "dimensions", "normalize", "task"}
)
"""Fields of parameters without an underscore, which could be the first word of any sentence."""
