"""Job: the protocol of a request that the engine can run.

Owns the protocol alone, and which fields are ignored.
"""

from collections.abc import Sequence
from typing import Protocol

from nv_engine import SamplingParams

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

    @property
    def num_sequences(self) -> int:
        """Prompts times n."""

    @property
    def params(self) -> SamplingParams:
        """As the request has them; max_tokens None is the rest of the context."""

    @property
    def is_streamed(self) -> bool:
        """The answer is sent as it comes."""

    @property
    def ignored(self) -> Sequence[str]:
        """Names of fields that the request has and nothing reads."""

    async def prompts(self) -> list[TokenPrompt]:
        """The prompts, tokenized."""

    def params_of(self, prompt: TokenPrompt) -> SamplingParams:
        """The parameters of one prompt, which may have a form that depends on it.

        Raises:
            ApiError: 400, the form is not one.
        """

    async def explained(self, error: ApiError) -> ApiError:
        """A refusal of the engine, with the field of the request that is wrong."""

    def events(self, generation: Generation) -> Events:
        """The streamed answer."""

    def whole(self, generation: Generation) -> Whole:
        """The answer in one piece."""


def ignored_fields(asked: Asked) -> list[str]:
    """Names that nothing reads, as a header can have them."""
    names = [name for name in asked.unknown if name not in KNOWN_ELSEWHERE]
    return [name if _is_plain(name) else "?" for name in names[:MAX_NAMES]]


def _is_plain(name: str) -> bool:
    return len(name) <= 64 and name.isascii() and name.isprintable() and "," not in name
