"""Validation: whether a request may run on a model, and how long its sequences may become.

Owns the checks that need the model's facts, those of a request's id and salt, the length limit, and
their sentences. Never queues anything. (An admission, elsewhere in this package, is a sequence that
takes a slot.)
"""

from array import array
from collections.abc import Collection, Container, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from operator import index as as_index
from typing import NamedTuple

import numpy as np

from nv_engine.facts import ModelFacts, PoolingFacts
from nv_engine.grammar import Grammar
from nv_engine.lora_request import MAX_ID as MAX_LORA_ID
from nv_engine.lora_request import LoRARequest
from nv_engine.params import SamplingParams
from nv_engine.pooling_params import EMBED_TASKS, PoolingParams
from nv_engine.values import NOT_LISTS, integer, shown

MAX_ID = 2**63 - 1
"""Largest id that a user may give a request."""
MAX_SALT = 256
"""Most characters of a salt of the prefix cache."""


@contextmanager
def numbered(done: Sized, count: int) -> Iterator[None]:
    """Name the prompt in a ValueError, if there are several: the one after those `done`."""
    try:
        yield
    except ValueError as error:
        if count == 1:
            raise
        raise ValueError(f"prompt {len(done)}: {error}") from error


def plain_id(request_id: int) -> int:
    """The id that a user gives a request, as a plain int.

    Raises:
        ValueError: it is not an integer, or below 0 or above MAX_ID.
    """
    return integer("request_id", request_id, 0, MAX_ID, hint="or leave it out: the next free one")


def check_new(request_id: int, listed: Container[int]) -> None:
    """Raise ValueError if an id is that of an earlier request of the same list."""
    if request_id in listed:
        raise ValueError(
            f"request_id is {request_id}: an earlier request of this list has that id, so give "
            "another, or leave it out"
        )


def plain_salt(cache_salt: str | None) -> bytes:
    """The salt of a request's blocks in the prefix cache; b"" if it has none.

    Raises:
        ValueError: it is not a str of 1 to MAX_SALT characters, or not valid Unicode.
    """
    if cache_salt is None:
        return b""
    if isinstance(cache_salt, str) and 1 <= len(cache_salt) <= MAX_SALT:
        try:
            return cache_salt.encode()
        except UnicodeEncodeError:
            pass
    raise ValueError(
        f"cache_salt is {shown(cache_salt)}: it must be a str of 1 to {MAX_SALT} characters, in "
        "valid Unicode (or leave it out, to share cached prefixes)"
    )


def plain_lora(lora: object) -> LoRARequest:
    """The adapter that a request names.

    Raises:
        TypeError: it is not a LoRARequest.
    """
    if not isinstance(lora, LoRARequest):
        raise TypeError(f"lora_request is {shown(lora)}: it must be a LoRARequest")
    return lora


def plain_lora_id(adapter_id: object) -> int:
    """An adapter's id as a plain int.

    Raises:
        ValueError: it is not an integer from 1 to 2**31 - 1.
    """
    return integer("lora_id", adapter_id, 1, MAX_LORA_ID)


def plain_prompt(token_ids: Iterable[int], facts: ModelFacts, *, plain: bool = False) -> list[int]:
    """The prompt as a list of plain ints; with `plain`, a list is known to be one, and is it.

    Raises:
        ValueError: it is empty, too long, or has an id that is not an integer or is outside the
            vocabulary. If tokens are drawn, one that leaves no room for one is too long.
    """
    prompt = token_ids if plain and isinstance(token_ids, list) else _plain_ids(token_ids)
    if not prompt:
        raise ValueError("the prompt is empty: it must have at least one token")
    _check_ids("the prompt", prompt, facts)
    num_drawn = 1 if facts.pooling is None else 0
    if len(prompt) + num_drawn > facts.max_model_len:
        raise ValueError(f"the prompt has {len(prompt)} tokens and {_bound(facts)}")
    return prompt


def _bound(facts: ModelFacts) -> str:
    """Which setting bounds a sequence's length, and what a user can do about it."""
    length, own = facts.max_model_len, facts.own_model_len
    no_room = "so there is no room for one more: shorten the prompt"
    if facts.pooling is not None:
        no_room = "which is less: pass truncate_prompt_tokens=-1, which keeps the last ones"
    if length < own:
        return f"max_model_len is {length}, {no_room}, or raise max_model_len (up to {own})"
    return f"the model's own length is {length} ({facts.length_place}), {no_room}"


def _plain_ids(token_ids: Iterable[int]) -> list[int]:
    if isinstance(token_ids, NOT_LISTS):
        raise ValueError(
            f"the prompt must be a list of integer token ids: it is {shown(token_ids)}"
        )
    try:
        prompt = list(token_ids)
        if set(map(type, prompt)) != {int}:  # plain ints nearly always, and a prompt is long
            prompt = list(map(as_index, prompt))
    except TypeError as error:
        raise ValueError(f"the prompt must be a list of integer token ids: {error}") from None
    return prompt


def no_text(tasks: Sequence[str]) -> str:
    """The sentence that refuses to generate on an engine which pools."""
    return (
        f"this engine pools ({', '.join(tasks)}) and generates no text: call embed, classify, "
        'score or encode, or load the model with runner="generate"'
    )


def check_kind(params: SamplingParams | PoolingParams, facts: ModelFacts) -> None:
    """Refuse parameters of the other kind of engine.

    Raises:
        TypeError: parameters of neither kind.
        ValueError: sampling parameters where prompts are pooled, or the reverse.
    """
    if not isinstance(params, SamplingParams | PoolingParams):
        raise TypeError(
            f"params is {shown(params)}: it must be a SamplingParams, or a PoolingParams"
        )
    if facts.pooling is not None and isinstance(params, SamplingParams):
        raise ValueError(no_text(facts.pooling.tasks))
    if facts.pooling is None and isinstance(params, PoolingParams):
        raise ValueError(
            "this engine generates text and does not pool: call generate, or load the model with "
            'runner="pooling"'
        )


def check_pooling(params: PoolingParams, pooling: PoolingFacts) -> None:
    """Check a pooling request's parameters against the model.

    Raises:
        ValueError: a task that the model lacks, or a value that does not fit task or model.
    """
    if params.task not in pooling.tasks:
        raise ValueError(
            f"task is {params.task!r}: this model has {', '.join(pooling.tasks)}; choose one of "
            'them, or another model (convert="embed" or "classify" when it is loaded may help)'
        )
    if params.dimensions is None:
        return
    if params.task not in EMBED_TASKS:
        raise ValueError(
            f"dimensions is {params.dimensions} and task {params.task!r}, whose results are not "
            "embeddings: leave dimensions out"
        )
    if params.dimensions > pooling.width:
        raise ValueError(
            f"dimensions is {params.dimensions}: it must be from 1 to {pooling.width}, the length "
            "of this model's embeddings"
        )


def check_params(params: SamplingParams, grammar: Grammar | None, facts: ModelFacts) -> None:
    """Check a request's parameters against the model.

    Raises:
        ValueError: a token id is outside the vocabulary, no token would be left to draw, or text
            is asked for, which needs a tokenizer.
    """
    _check_ids("logit_bias", params.logit_bias or (), facts)
    allowed = params.allowed_token_ids or ()
    if len(allowed) > facts.vocab_size:
        raise ValueError(
            f"allowed_token_ids has {len(allowed)} ids and the vocabulary {facts.vocab_size}: name "
            "each once"
        )
    _check_ids("allowed_token_ids", allowed, facts)
    _check_ids("stop_token_ids", params.stop_token_ids or (), facts)
    for word in params.bad_words_token_ids or ():
        _check_ids("bad_words_token_ids", word, facts)
    if params.bad_words and params.bad_words_token_ids is None:
        raise ValueError(
            f"bad_words is {shown(params.bad_words)} and the engine has no tokenizer: use "
            "bad_words_token_ids"
        )
    _check_some_allowed(params, facts)
    _check_grammar(params, grammar, facts)


def _check_some_allowed(params: SamplingParams, facts: ModelFacts) -> None:
    """Refuse parameters that leave no token to draw."""
    forbidden = {word[0] for word in params.bad_words_token_ids or () if len(word) == 1}
    if params.min_tokens:
        forbidden.update(facts.eos_token_ids, params.stop_token_ids or ())
    num_ids = facts.vocab_size if facts.num_ids is None else facts.num_ids
    if params.allowed_token_ids is None and len(forbidden) >= num_ids:
        drawn = [token for token, bias in (params.logit_bias or {}).items() if bias > 0]
        if forbidden.issuperset((*range(num_ids), *drawn)):
            raise ValueError(
                "bad_words, bad_words_token_ids and, before min_tokens, stop_token_ids and EOS "
                f"forbid all {num_ids} tokens: leave one that may be drawn"
            )
    allowed, words = set(params.allowed_token_ids or ()), params.bad_words_token_ids or ()
    if not allowed or not allowed <= forbidden | {word[-1] for word in words}:
        return
    last_of: dict[tuple[int, ...], set[int]] = {}  # by the tokens before it
    for word in words:
        last_of.setdefault(tuple(word[:-1]), set()).add(word[-1])
    for tokens in [(), *(before for before in last_of if before and allowed.issuperset(before))]:
        ends = [tokens[start:] for start in range(len(tokens) + 1)]
        if allowed <= forbidden.union(*(last_of.get(end, ()) for end in ends)):
            after = f" after {list(tokens)}" if tokens else ""
            raise ValueError(
                f"allowed_token_ids is {shown(params.allowed_token_ids)}, all of which are{after} "
                "bad words or stop tokens before min_tokens: allow another token"
            )


def _check_grammar(params: SamplingParams, grammar: Grammar | None, facts: ModelFacts) -> None:
    """Refuse a grammar that is only named, and one that could never end."""
    if (params.structured_outputs is None) != (grammar is None):
        raise ValueError(
            f"structured_outputs is {shown(params.structured_outputs)} and the engine has no "
            "tokenizer: it also needs the compiled grammar, and takes none without the other"
        )
    if grammar is not None and not facts.eos_token_ids:
        raise ValueError(
            "structured_outputs needs an EOS token, and the tokenizer and the model's files name "
            "none: add eos_token_id to generation_config.json (to a GGUF file: "
            "tokenizer.ggml.eos_token_id)"
        )


def _check_ids(name: str, ids: Collection[int], facts: ModelFacts) -> None:
    if ids and not _are_below(facts.vocab_size, ids):
        wrong = next(token for token in ids if not 0 <= token < facts.vocab_size)
        raise ValueError(
            f"{name} has token id {shown(wrong)}: the vocabulary is 0 .. {facts.vocab_size - 1}"
        )


def _are_below(bound: int, ids: Collection[int]) -> bool:
    """Whether all lie in 0 .. bound - 1: an array of 32 bits refuses the others by itself."""
    packed = array("I")
    try:
        packed.fromlist(ids if isinstance(ids, list) else list(ids))
    except OverflowError:
        return False
    return int(np.frombuffer(packed, np.uint32).max()) < bound


def check_fits(prompt_len: int, facts: ModelFacts) -> None:
    """Refuse a prompt that could never run.

    Raises:
        ValueError: the KV cache has too few blocks for it.
    """
    size, num_blocks = facts.block_size, facts.num_blocks
    if prompt_len > num_blocks * size:
        raise ValueError(
            f"the prompt has {prompt_len} tokens, which takes {-(-prompt_len // size)} blocks of "
            f"{size}, and the KV cache has {num_blocks}: raise num_kvcache_blocks or "
            "gpu_memory_utilization, or shorten the prompt"
        )


class LengthLimit(NamedTuple):
    """Where a sequence ends with finish_reason "length"."""

    length: int
    """Tokens, prompt included."""
    reason: str | None = None
    """Why there, if neither max_tokens nor max_model_len asks for it."""


def length_limit(prompt_len: int, params: SamplingParams, facts: ModelFacts) -> LengthLimit:
    """After max_tokens, at max_model_len, or with the KV cache full: whichever comes first."""
    capacity = facts.num_blocks * facts.block_size + 1  # the last token is never stored
    asked = facts.max_model_len
    if params.max_tokens is not None:
        asked = min(asked, prompt_len + params.max_tokens)
    if asked <= capacity:
        return LengthLimit(asked)
    return LengthLimit(
        capacity,
        f"it alone fills the KV cache, {facts.num_blocks} blocks of {facts.block_size} tokens: "
        "raise num_kvcache_blocks or gpu_memory_utilization, or lower max_tokens",
    )
