"""Adapters: the forms of `lora_request`, one for all prompts or one per prompt.

Owns which values are allowed. Never reads an adapter's files: the engine does.
"""

from collections.abc import Sequence
from typing import TypeAlias

from nv_engine import LoRARequest
from nv_engine.values import NOT_LISTS, shown

from nv_api.prompts import TokenPrompt

LoRALike: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None
"""One for all prompts, or one per prompt, None among them: the base model alone."""


def with_adapters(prompts: Sequence[TokenPrompt], given: LoRALike) -> list[TokenPrompt]:
    """The prompts, each with its adapter.

    Raises:
        TypeError: a value that is not a LoRARequest.
        ValueError: a list that is not as long as the list of prompts.
    """
    if given is None:
        return list(prompts)
    if isinstance(given, LoRARequest):
        return [prompt._replace(lora=given) for prompt in prompts]
    if isinstance(given, NOT_LISTS) or not isinstance(given, Sequence):
        raise TypeError(
            f"lora_request is {shown(given)}: it must be a LoRARequest, or a list of them"
        )
    if wrong := [each for each in given if not isinstance(each, LoRARequest | None)]:
        raise TypeError(f"lora_request has {shown(wrong[0])}: each must be a LoRARequest, or None")
    if len(given) != len(prompts):
        raise ValueError(
            f"lora_request has {len(given)} entries, and the number of prompts is {len(prompts)}: "
            "give one for all, or one per prompt"
        )
    return [prompt._replace(lora=each) for prompt, each in zip(prompts, given, strict=True)]
