"""Scoring: the scores of pairs of texts.

Owns which prompts the pairs need, and what is made of their results: an embedding model embeds each
text, and a first text that all pairs share once; a classifier of one label reads a pair at once.
Never runs a prompt.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from nv_engine import PoolingParams

from nv_api.pooling_outputs import PooledValues, cosines
from nv_api.pooling_prompts import joined, with_prompt
from nv_api.prompts import Prompt, TokenPrompt, check_length, tokenize
from nv_api.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nv_models import PoolerConfig

T = TypeVar("T")


class Scoring:
    """Pairs of texts.

    Args:
        first: of `paired`.
        second: as many.
        pooler: of the model.
    """

    def __init__(
        self, first: Sequence[Prompt], second: Sequence[Prompt], pooler: "PoolerConfig"
    ) -> None:
        self._first = first
        self._second = second
        self._pooler = pooler
        self.embeds = pooler.kind == "embed"
        """Each text has a prompt of its own: first those of the first texts, then the others."""
        is_shared = all(each is first[0] for each in first)
        self.num_first = (1 if is_shared else len(first)) if self.embeds else 0
        """Prompts of first texts alone."""

    @property
    def task(self) -> str:
        """Of every prompt."""
        return "embed" if self.embeds else "score"

    @property
    def num_prompts(self) -> int:
        """How many the pairs need."""
        return self.num_first + len(self._second)

    def params(self, given: PoolingParams) -> PoolingParams:
        """The user's parameters for a prompt; a cosine needs embeddings of length 1."""
        return replace(given, use_activation=True) if self.embeds else given

    def prompts(
        self,
        tokenizer: Tokenizer | None,
        chat_template: str | None,
        max_model_len: int | None = None,
    ) -> list[TokenPrompt]:
        """The prompts, tokenized.

        Args:
            tokenizer: None: the texts are token ids.
            chat_template: of a classifier's prompt; None: as `joined` does without one.
            max_model_len: as of `check_length`, which each text is checked by alone.

        Raises:
            ValueError: as `joined`, or a template for a model that embeds.
            PromptTooLong: as `check_length`.
        """
        for text in {each.text for each in (*self._first, *self._second) if each.text is not None}:
            if tokenizer is not None:
                check_length(text, tokenizer, max_model_len)
        if not self.embeds:
            return joined(self._first, self._second, tokenizer, self._pooler, chat_template)
        if chat_template is not None:
            raise ValueError(
                "chat_template is of a classifier, which reads both texts at once: "
                "this model embeds each alone; leave chat_template out"
            )
        alone = [*self._first[: self.num_first], *self._second]
        return tokenize(with_prompt(alone, self._pooler, None), tokenizer)

    def members(self, of_prompts: Sequence[T]) -> list[tuple[T, ...]]:
        """For each pair, those of its prompts: two, or one that has both texts."""
        if not self.embeds:
            return [(each,) for each in of_prompts]
        first, second = of_prompts[: self.num_first], of_prompts[self.num_first :]
        if len(first) < len(second):
            first = [first[0]] * len(second)
        return list(zip(first, second, strict=True))

    def scores(self, results: Sequence[PooledValues]) -> list[PooledValues]:
        """One for each pair, of the results of its prompts."""
        if not self.embeds:
            return [*results]
        first, second = zip(*self.members(results), strict=True)
        return cosines(first, second)
