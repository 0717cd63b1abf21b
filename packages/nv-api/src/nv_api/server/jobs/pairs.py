"""PairsJob: a request to score pairs of texts.

Owns what its texts mean. What is made of the scores is its kinds'.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from nv_engine.values import shown

from nv_api.pooling_outputs import PooledValues
from nv_api.pooling_prompts import paired
from nv_api.prompts import Prompt, TokenPrompt, checked_text
from nv_api.scoring import Scoring
from nv_api.server.errors import invalid, refusals
from nv_api.server.jobs.pooled import PooledJob
from nv_api.server.protocol.pooled import Pooled
from nv_api.server.service import Service


class PairsJob(PooledJob):
    """Pairs of texts to score.

    Args:
        asked: the request.
        names: of its two fields with texts.
        sides: their texts: one and any number, or as many of each.
        service: the server's parts.
        name: of the response.

    Raises:
        ApiError: 400 or 404, a field is wrong, or the model makes no scores.
    """

    def __init__(
        self,
        asked: Pooled,
        names: tuple[str, str],
        sides: tuple[Sequence[str], Sequence[str]],
        service: Service,
        name: str,
    ) -> None:
        service.check_task("embed", "score")
        self._names = names
        with refusals(names[0]):
            first, second = paired(_prompts(sides[0]), _prompts(sides[1]), names)
        self._scoring = Scoring(first, second, service.pooler)
        super().__init__(asked, self._scoring.task, service, name)
        self.params = self._scoring.params(self.params)
        self.num_sequences = self._scoring.num_prompts

    async def prompts(self) -> list[TokenPrompt]:
        """The prompts, tokenized."""
        service = self._service
        template = None if self._scoring.embeds else service.options.chat_template
        with refusals(self._names[1]):
            made = await asyncio.to_thread(self._scoring.prompts, service.llm.text, template)
        return self.kept(made)

    def place(self, index: int) -> str:
        """The field that a prompt is made of."""
        number = index - self._scoring.num_first
        if number < 0:
            return f"{self._names[0]}.{index}"
        return f"{self._names[1]}.{number}"

    def scores(self, results: Sequence[PooledValues]) -> list[float]:
        """One for each pair."""
        return [values.floats()[0] for values in self._scoring.scores(results)]


def texts(given: Any, name: str) -> list[str]:  # noqa: ANN401
    """The texts of a field.

    Args:
        given: a text or a list of texts, each of which may be an object with a `text`.
        name: of the field.

    Raises:
        ApiError: 400, it is none of these, or a text is empty.
    """
    if not isinstance(given, list):
        return [_text(given, name)]
    if not given:
        raise invalid(f"{name} is []: give at least one text", name)
    return [_text(each, f"{name}.{index}") for index, each in enumerate(given)]


def _text(given: Any, place: str) -> str:  # noqa: ANN401
    text = given.get("text") if isinstance(given, dict) else given
    if not isinstance(text, str):
        raise invalid(
            f"{place} is {shown(given)}: it must be a text, or an object with a text", place
        )
    with refusals(place):
        return checked_text(text, place)


def _prompts(side: Sequence[str]) -> list[Prompt]:
    return [Prompt(text, None) for text in side]
