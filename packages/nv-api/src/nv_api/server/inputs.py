"""Inputs: the texts and token ids of one field, in OpenAI's four forms.

Owns the forms, and whether a text gets the tokenizer's special tokens. Never checks an id: the
engine does.
"""

from collections.abc import Sequence
from typing import Any

from nv_engine.values import shown

from nv_api.prompts import Prompt, PromptLike, TokenPrompt, prompt_list
from nv_api.server.errors import invalid, refusals
from nv_api.server.llm import ServedLLM


def input_list(given: Any, name: str) -> list[Prompt]:  # noqa: ANN401
    """The prompts of a field.

    Args:
        given: a text, token ids, or a list of either.
        name: of the field.

    Raises:
        ApiError: 400, it is none of these.
    """
    are_several = isinstance(given, list) and given and isinstance(given[0], str | list)
    if not isinstance(given, str) and not (isinstance(given, list) and given):
        raise invalid(
            f"{name} is {shown(given)}: it must be a text, a list of token ids, or a list of "
            "either, and not empty",
            name,
        )
    for each in given if are_several else [given]:
        if not isinstance(each, str | list):
            raise invalid(
                f"{name} has {shown(each)}: every entry must be a text or a list of token ids",
                name,
            )
    with refusals(name):
        return prompt_list(given)


async def tokenized(
    llm: ServedLLM,
    prompts: Sequence[Prompt],
    *,
    add_special_tokens: bool,
    truncates: bool = False,
) -> list[TokenPrompt]:
    """The token ids of prompts, made beside the event loop.

    Raises:
        ValueError: a prompt is a text, which needs a tokenizer.
        PromptTooLong: a text is far too long, unless it will be truncated.
    """
    return await llm.tokenize(
        [_like(each) for each in prompts],
        add_special_tokens=add_special_tokens,
        truncates=truncates,
    )


def _like(prompt: Prompt) -> PromptLike:
    """A prompt as `AsyncLLM` takes it."""
    return prompt.token_ids if prompt.token_ids is not None else prompt.text or ""
