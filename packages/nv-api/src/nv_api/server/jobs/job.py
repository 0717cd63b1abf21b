"""Job: the protocol of a request that the engine can run.

Owns the protocol alone, and which fields are ignored.
"""

from collections.abc import Sequence
from typing import Protocol

from nv_engine import PoolingParams, SamplingParams

from nv_api.prompts import TokenPrompt
from nv_api.server.answers.form import Events, Whole
from nv_api.server.errors import ApiError
from nv_api.server.generation import Generation
from nv_api.server.protocol.fields import Asked
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


def ignored_fields(asked: Asked) -> list[str]:
    """Names that nothing reads, as a header can have them."""
    names = [name for name in asked.unknown if name not in KNOWN_ELSEWHERE]
    return [name if _is_plain(name) else "?" for name in names[:MAX_NAMES]]


def _is_plain(name: str) -> bool:
    return len(name) <= 64 and name.isascii() and name.isprintable() and "," not in name
