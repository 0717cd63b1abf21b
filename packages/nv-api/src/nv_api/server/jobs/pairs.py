"""PairsJob: a request to score pairs of texts.

Owns what its texts mean. What is made of the scores is its kinds'.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from nv_engine.values import shown

from nv_api.pooling_outputs import PooledValues
from nv_api.pooling_prompts import paired
from nv_api.prompts import Prompt, TokenPrompt, checked_text
from nv_api.scoring import Scoring
from nv_api.server.errors import invalid, refusals
from nv_api.server.jobs.pooled import PooledJob
from nv_api.server.protocol.pooled import Pooled
from nv_api.server.service import Service


class Side(NamedTuple):
    """The first or the second texts of pairs."""

    name: str
    """Of the field."""
    texts: list[str]
    is_list: bool

    @classmethod
    def of(cls, given: Any, name: str) -> "Side":  # noqa: ANN401
        """The texts of a field.

        Args:
            given: a text or a list of texts, each of which may be an object with a `text`.
            name: of the field.

        Raises:
            ApiError: 400, it is none of these, or a text is empty.
        """
        if not isinstance(given, list):
            return cls(name, [_text(given, name)], is_list=False)
        if not given:
            raise invalid(f"{name} is []: give at least one text", name)
        texts = [_text(each, f"{name}.{index}") for index, each in enumerate(given)]
        return cls(name, texts, is_list=True)

    @property
    def prompts(self) -> list[Prompt]:
        """The texts as prompts."""
        return [Prompt(text, None) for text in self.texts]

    def place(self, index: int) -> str:
        """Where one of the texts is in the request."""
        return f"{self.name}.{index}" if self.is_list else self.name


class PairsJob(PooledJob):
    """Pairs of texts to score.

    Args:
        asked: the request.
        first: one text, or as many as there are second ones.
        second: any number.
        service: the server's parts.
        name: of the response.

    Raises:
        ApiError: 400 or 404, a field is wrong, or the model makes no scores.
    """

    def __init__(
        self, asked: Pooled, first: Side, second: Side, service: Service, name: str
    ) -> None:
        service.check_task("embed", "score")
        with refusals(first.name):
            pairs = paired(first.prompts, second.prompts, (first.name, second.name))
        self._first = first
        self._second = second
        self._scoring = Scoring(*pairs, service.pooler)
        super().__init__(asked, self._scoring.task, service, name)
        self.field = second.name
        if not self._scoring.embeds:
            self.beside = f" with its {first.name}"
        self.params = self._scoring.params(self.params)
        self.num_sequences = self._scoring.num_prompts

    async def prompts(self) -> list[TokenPrompt]:
        """The prompts, tokenized."""
        service = self._service
        template = None if self._scoring.embeds else service.options.chat_template
        length = None if self.truncates else service.llm.facts.max_model_len
        with refusals(self.field):
            made = await asyncio.to_thread(
                self._scoring.prompts, service.llm.text, template, length
            )
        return self.kept(made)

    def place(self, index: int, num_prompts: int) -> str:
        """The text that a prompt is made of, or the second of its two."""
        num_first = self._scoring.num_first
        if index < num_first:
            return self._first.place(index)
        return self._second.place(index - num_first)

    def scores(self, results: Sequence[PooledValues]) -> list[float]:
        """One for each pair."""
        return [values.floats()[0] for values in self._scoring.scores(results)]


def _text(given: Any, place: str) -> str:  # noqa: ANN401
    text = given.get("text") if isinstance(given, dict) else given
    if not isinstance(text, str):
        raise invalid(
            f"{place} is {shown(given)}: it must be a text, or an object with a text", place
        )
    with refusals(place):
        return checked_text(text, place)
