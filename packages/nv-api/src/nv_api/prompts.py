"""Prompts: the ways to write one, and the one form that the engine takes.

Owns which values are prompts, and what a prompt may hold.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from nv_engine.values import NOT_LISTS, plain, shown, unicode

from nv_api.said import Place
from nv_api.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nv_engine import LoRARequest

PromptLike: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a dict with "prompt" or "prompt_token_ids", and perhaps "cache_salt"."""

KEYS = ("prompt", "prompt_token_ids", "cache_salt")
UNBUILT_KEYS = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids")
FORMS = "a str, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"


class PromptTooLong(ValueError):
    """A text that surely has more tokens than the context; it was not tokenized."""


class Prompt(NamedTuple):
    """One prompt: its text, its token ids, or both (then the ids are run)."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None
    """As the user gave it; the engine checks it."""


SHORT = 4096
"""Characters of a text that is tokenized in any case: that takes a millisecond, and the error has
the exact number and the text's place in a list."""


class TokenPrompt(NamedTuple):
    """One prompt, ready for the engine."""

    text: str | None
    token_ids: list[int]
    """Plain ints: the engine does not check their types again."""
    cache_salt: str | None = None
    """Only prompts with an equal salt share blocks of the prefix cache; the engine checks it."""
    place: Place | None = None
    """Where the completion begins, if stop strings are searched after its thought only; the server
    sets it. None: they are searched in all of the text."""
    lora: "LoRARequest | None" = None
    """The adapter that it is computed with; None: the base model alone."""


def prompt_list(prompts: object) -> list[Prompt]:
    """The prompts of one call, in order; a single prompt, in any form, is a list of one.

    Raises:
        TypeError: a value that is not a prompt.
        ValueError: an empty prompt, or a dict with the wrong keys.
        NotImplementedError: a dict with a key that is not built yet.
    """
    if _is_array(prompts):
        prompts = plain(prompts)
    if isinstance(prompts, str | Mapping) or _is_token_ids(prompts):
        return [single_prompt(prompts)]
    if not isinstance(prompts, Sequence):
        raise TypeError(f"prompts is a {type(prompts).__name__}: it must be {FORMS}, or a list")
    several = len(prompts) > 1
    return [
        single_prompt(p, f"prompt {i}" if several else "the prompt") for i, p in enumerate(prompts)
    ]


def single_prompt(prompt: object, name: str = "the prompt") -> Prompt:
    """One prompt; `name` is its name in errors. Raises as `prompt_list`."""
    if isinstance(prompt, str):
        return Prompt(checked_text(prompt, name), None)
    if isinstance(prompt, Mapping):
        return _from_dict(prompt, name)
    return Prompt(None, _token_ids(prompt, name))


def tokenize(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer | None,
    max_model_len: int | None = None,
    *,
    add_special_tokens: bool = True,
) -> list[TokenPrompt]:
    """The token ids of every prompt.

    Args:
        prompts: texts and token ids.
        tokenizer: may be None if every prompt has token ids.
        max_model_len: as of `check_length`.
        add_special_tokens: texts get the tokenizer's first and last special tokens.

    Raises:
        ValueError: a prompt is a text, which needs a tokenizer.
        PromptTooLong: as `check_length`.
    """
    texts = [p.text for p in prompts if p.token_ids is None and p.text is not None]
    if texts and tokenizer is None:
        raise ValueError(
            f"the prompt {shown(texts[0])} is text and there is no tokenizer "
            "(skip_tokenizer_init=True): pass token ids"
        )
    if tokenizer is not None:
        for text in texts:
            check_length(text, tokenizer, max_model_len)
    encoded = iter(
        tokenizer.encode(texts, add_special_tokens=add_special_tokens)
        if tokenizer is not None
        else ()
    )
    return [
        TokenPrompt(p.text, next(encoded) if p.token_ids is None else p.token_ids, p.cache_salt)
        for p in prompts
    ]


def check_length(text: str, tokenizer: Tokenizer, max_model_len: int | None) -> None:
    """Refuse a text that is far too long before it is tokenized, which would take long.

    Args:
        text: of a prompt.
        tokenizer: whose tokens bound the text's length.
        max_model_len: the context, in tokens; None: it has no bound, as where a text is truncated.

    Raises:
        PromptTooLong: the text surely has more tokens; shorter ones are left to the engine.
    """
    if max_model_len is None or len(text) <= max(max_model_len // 4, SHORT):  # UTF-8: 4 bytes each
        return
    if (least := tokenizer.bound.of(text)) > max_model_len:
        raise PromptTooLong(
            f"the prompt is too long: it has at least {least} tokens and this model's maximum "
            f"context length is {max_model_len} tokens (max_model_len); shorten it"
        )


def _is_token_ids(prompts: object) -> bool:
    """True for a non-empty sequence of integers: one prompt, not several."""
    return isinstance(prompts, Sequence) and bool(prompts) and _is_integer(prompts[0])


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and not _is_array(value)


def _is_array(value: object) -> bool:
    """True for NumPy arrays and tensors of one dimension or more."""
    return bool(getattr(value, "ndim", 0))


def checked_text(text: str, name: str) -> str:
    """A prompt's text; raises ValueError if it is empty or not valid Unicode."""
    if not text:
        raise ValueError(f"{name} is empty: give at least one character")
    return unicode(name, text)


def _token_ids(ids: object, name: str) -> list[int]:
    if _is_array(ids):
        ids = plain(ids)
    if not isinstance(ids, Sequence) or isinstance(ids, NOT_LISTS):
        raise TypeError(f"{name} is a {type(ids).__name__}: it must be {FORMS}")
    if ids and list(map(type, ids)).count(int) == len(ids):  # nearly always; a prompt is long
        return list(ids)
    if wrong := [token for token in ids if not _is_integer(token)]:
        raise TypeError(
            f"{name} holds {shown(wrong[0])} among its token ids: every one must be an integer"
        )
    if not ids:
        raise ValueError(f"{name} is empty: give at least one token id")
    return [operator.index(token) for token in ids]


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, Mapping | Sequence) and not value)


def _from_dict(prompt: Mapping[str, Any], name: str) -> Prompt:
    for key in prompt:
        if key in UNBUILT_KEYS and not _is_nothing(prompt[key]):
            raise NotImplementedError(
                f"{name} has {shown(key)}, which is not built yet: leave it out"
            )
        if key not in KEYS + UNBUILT_KEYS:
            raise ValueError(
                f"{name} has an unknown key {shown(key)}: it may have {', '.join(KEYS)}"
            )
    text, ids, salt = (prompt.get(key) for key in KEYS)
    if not isinstance(text, str | None):
        raise TypeError(f"{name} has {shown(text)} as its 'prompt': it must be a str")
    if ids is not None:
        return Prompt(text, _token_ids(ids, name), salt)
    if text is None:
        raise ValueError(
            f"{name} is a dict without 'prompt' or 'prompt_token_ids': give one of them"
        )
    return Prompt(checked_text(text, name), None, salt)
