"""Forms: what every answer has: an id, a time, a model; and the protocols of its two kinds.

Owns the end of a stream of chat and completions, too.
"""

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from nv_api.outputs import CompletionOutput
from nv_api.server.errors import ApiError
from nv_api.server.generation import Usage
from nv_api.server.sse import DONE, event


@dataclass(frozen=True, kw_only=True)
class Head:
    """The fields that begin every object of a response.

    Attributes:
        id: of the response.
        model: the name that the client used.
        created: seconds since 1970.
        has_usage: a stream ends with a chunk of usage.
        has_running_usage: so does every chunk.
        has_token_ids: choices have their tokens.
    """

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    has_usage: bool = False
    has_running_usage: bool = False
    has_token_ids: bool = False

    def fields(self, kind: str) -> dict[str, Any]:
        """As JSON has them."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Events(Protocol):
    """The events of a streamed answer."""

    closing: bytes
    """The mark that ends the stream, after the last event."""

    def push(self, number: int, delta: CompletionOutput) -> bytes:
        """The events of what is new of a completion of a prompt; b"" if there is none yet."""

    def end(self, usage: Usage) -> bytes:
        """The last events."""

    def fail(self, error: ApiError) -> bytes:
        """The last events, in place of the rest of the answer."""


class Whole(Protocol):
    """An answer that is sent once it is complete."""

    def push(self, number: int, delta: CompletionOutput) -> None:
        """Add what is new of a completion of a prompt."""

    async def body(self, usage: Usage) -> bytes:
        """The response as JSON; a long one is made beside the event loop."""


class EndsWithDone:
    """The end of a stream of chat or completions: an error is an event, and `[DONE]` is last."""

    closing = DONE

    def fail(self, error: ApiError) -> bytes:
        """The error as an event."""
        return event(error.envelope)
