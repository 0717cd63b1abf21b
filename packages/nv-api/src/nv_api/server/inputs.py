"""Inputs: the texts and token ids of one field, in OpenAI's four forms.

Owns the forms, and whether a text gets the tokenizer's special tokens. Never checks an id: the
engine does.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from nv_engine.values import shown

from nv_api.prompts import Prompt, PromptLike, TokenPrompt, check_length, prompt_list
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
    adds_special_tokens: bool,
    truncates: bool = False,
) -> list[TokenPrompt]:
    """The token ids of prompts, made beside the event loop.

    Raises:
        ValueError: a prompt is text and there is no tokenizer.
        PromptTooLong: a text is far too long, unless it will be truncated.
    """
    if adds_special_tokens:
        return await llm.tokenize([_like(each) for each in prompts], truncates=truncates)
    return await asyncio.to_thread(_plainly, llm, prompts, truncates)


def _plainly(llm: ServedLLM, prompts: Sequence[Prompt], truncates: bool) -> list[TokenPrompt]:
    """Without the tokenizer's first and last special tokens."""
    tokenizer = llm.text
    if tokenizer is None:
        raise ValueError("there is a text and no tokenizer: send token ids")
    for prompt in prompts:
        if prompt.token_ids is None and not truncates:
            check_length(prompt.text or "", tokenizer, llm.facts.max_model_len)
    return [
        TokenPrompt(prompt.text, prompt.token_ids)
        if prompt.token_ids is not None
        else TokenPrompt(
            prompt.text, tokenizer.encode([prompt.text or ""], add_special_tokens=False)[0]
        )
        for prompt in prompts
    ]


def _like(prompt: Prompt) -> PromptLike:
    """A prompt as `AsyncLLM` takes it."""
    return prompt.token_ids if prompt.token_ids is not None else prompt.text or ""
