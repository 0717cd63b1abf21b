"""Job: the protocol of a request that the engine can run.

Owns the protocol alone, and which fields are ignored.
"""

from collections.abc import Sequence
from typing import Protocol

from nv_engine import PoolingParams, SamplingParams

from nv_api.prompts import TokenPrompt
from nv_api.server.answers.form import Events, Whole
from nv_api.server.errors import ApiError, invalid
from nv_api.server.generation import Generation
from nv_api.server.protocol.fields import Asked, Sampling
from nv_api.server.protocol.responses import ResponsesRequest
from nv_api.server.sampling import KNOWN_ELSEWHERE

MAX_NAMES = 32
"""Names in the header `x-ignored-fields`."""


class Job(Protocol):
    """One request, checked."""

    operation: str
    """OpenTelemetry's name of what it does."""

    @property
    def num_sequences(self) -> int:
        """Prompts times n."""

    @property
    def ignored(self) -> Sequence[str]:
        """Names of fields that the request has and nothing reads."""

    async def prompts(self) -> list[TokenPrompt]:
        """The prompts, tokenized."""

    def params_of(self, prompt: TokenPrompt) -> SamplingParams | PoolingParams:
        """The parameters of one prompt, which may have a form that depends on it.

        Raises:
            ApiError: 400, the form is not one, or the prompt leaves no room for an answer.
        """

    async def explained(self, error: ApiError) -> ApiError:
        """A refusal of the engine, with the field of the request that is wrong."""

    def events(self, generation: Generation) -> Events | None:
        """The streamed answer; None: it is sent in one piece."""

    def whole(self, generation: Generation) -> Whole:
        """The answer in one piece."""


def check_stream_options(asked: Sampling | ResponsesRequest) -> None:
    """Refuse options of a stream for an answer in one piece, as OpenAI does; raises ApiError."""
    if asked.stream_options is not None and not asked.stream:
        raise invalid(
            "stream_options is given and stream is not true: set stream to true, or leave it out",
            "stream_options",
        )


def ignored_fields(asked: Asked) -> list[str]:
    """Names that nothing reads, as a header can have them."""
    names = [name for name in asked.unknown if name not in KNOWN_ELSEWHERE]
    return [name if _is_plain(name) else "?" for name in names[:MAX_NAMES]]


def _is_plain(name: str) -> bool:
    return len(name) <= 64 and name.isascii() and name.isprintable() and "," not in name
