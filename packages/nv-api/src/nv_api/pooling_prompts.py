"""Prompts of pooling requests: a model's named prompts, truncation, and pairs of texts.

Owns how a text and its prompt, or two texts, become token ids. Never checks the ids: the engine
does.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nv_engine.pooling_params import WHOLE_CONTEXT
from nv_engine.values import shown

from nv_api.conversation import Rendering, chat_prompt
from nv_api.prompts import Prompt, TokenPrompt, tokenize
from nv_api.tokenizer import Tokenizer, existing

if TYPE_CHECKING:
    from nv_engine import PoolingParams
    from nv_models import PoolerConfig


def with_prompt(
    prompts: Sequence[Prompt], pooler: "PoolerConfig", name: str | None
) -> list[Prompt]:
    """Put a prompt of the model's in front of each text.

    Args:
        prompts: those of one call; token ids stay as they are.
        pooler: has the model's prompts.
        name: of the prompt; None: the model's default, if it has one.

    Raises:
        ValueError: an unknown name, a name for token ids, or a model that leaves the tokens of a
            prompt out of its means.
    """
    known = dict(pooler.prompts)
    if name is not None and (not isinstance(name, str) or name not in known):
        names = f"this model has {', '.join(map(repr, known))}" if known else "this model has none"
        raise ValueError(
            f"prompt_name is {shown(name)}: {names} (config_sentence_transformers.json); put a "
            "prompt of your own in front of the text"
        )
    if name is not None and any(prompt.token_ids is not None for prompt in prompts):
        raise ValueError(f"prompt_name is {shown(name)} and a prompt is token ids: give texts")
    text = known.get(name or pooler.default_prompt or "", "")
    if not text:
        return list(prompts)
    if pooler.reads_whole_prompt and not pooler.pools_prompt:
        raise ValueError(
            f"the prompt {shown(name or pooler.default_prompt)} goes in front of the text, and the "
            "model leaves its tokens out of the result (include_prompt is false in its Pooling "
            "module's config.json), which is not built: give token ids, or set include_prompt to "
            "true, which changes the embedding"
        )
    return [
        prompt if prompt.text is None or prompt.token_ids is not None
        else prompt._replace(text=text + prompt.text)
        for prompt in prompts
    ]  # fmt: skip


def truncated(
    prompts: Sequence[TokenPrompt], params: Sequence["PoolingParams"], max_model_len: int
) -> list[TokenPrompt]:
    """Keep the last tokens of each prompt that asks for it.

    Raises:
        ValueError: more tokens are to be kept than the engine takes.
    """
    kept = []
    for prompt, each in zip(prompts, params, strict=True):
        most = each.truncate_prompt_tokens
        if most is None:
            kept.append(prompt)
            continue
        if most > max_model_len:
            raise ValueError(
                f"truncate_prompt_tokens is {most}: it must be at most max_model_len, which is "
                f"{max_model_len} (-1 means that many)"
            )
        most = max_model_len if most == WHOLE_CONTEXT else most
        kept.append(prompt._replace(token_ids=prompt.token_ids[-most:]))
    return kept


def bound_of(params: Sequence["PoolingParams"], max_model_len: int) -> int | None:
    """The most tokens of a text of these requests; None: one of them truncates its prompt."""
    is_kept = all(each.truncate_prompt_tokens is None for each in params)
    return max_model_len if is_kept else None


def paired(
    first: Sequence[Prompt], second: Sequence[Prompt], names: tuple[str, str] = ("data_1", "data_2")
) -> tuple[list[Prompt], list[Prompt]]:
    """As many first as second prompts: one first goes with each second.

    Args:
        first: of the pairs.
        second: of the pairs.
        names: of the two in errors.

    Raises:
        ValueError: there are none, or their numbers do not fit.
    """
    for name, side in zip(names, (first, second), strict=True):
        if not side:
            raise ValueError(f"{name} is empty: give at least one text")
    if len(first) == 1:
        first = list(first) * len(second)
    if len(first) != len(second):
        raise ValueError(
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}: give one and any "
            "number, or as many of each"
        )
    return list(first), list(second)


def joined(
    first: Sequence[Prompt],
    second: Sequence[Prompt],
    tokenizer: Tokenizer | None,
    pooler: "PoolerConfig",
    chat_template: str | None,
) -> list[TokenPrompt]:
    """One prompt of each pair.

    With a template: it gets two messages, with the roles "query" and "document". Without one: the
    tokenizer's own pair, or for a head of tokens one text after the other, as vLLM makes them.

    Raises:
        ValueError: texts and token ids in one call, ids with a template, a pair whose cache_salts
            differ, or texts without a tokenizer.
    """
    pairs = list(zip(first, second, strict=True))
    _check_pairs(pairs, has_template=chat_template is not None)
    if first[0].token_ids is not None:
        made = [
            TokenPrompt(None, [*(one.token_ids or ()), *(two.token_ids or ())])
            for one, two in pairs
        ]
    else:
        texts = [(one.text or "", two.text or "") for one, two in pairs]  # each has one: checked
        made = _joined_texts(texts, tokenizer, pooler, chat_template)
    return [
        prompt._replace(cache_salt=one.cache_salt) for prompt, one in zip(made, first, strict=True)
    ]


def _check_pairs(pairs: Sequence[tuple[Prompt, Prompt]], *, has_template: bool) -> None:
    """Check that a call's pairs are of one kind, and that the texts of each have one salt."""
    for index, (one, two) in enumerate(pairs):
        is_ids = one.token_ids is not None
        if is_ids != (two.token_ids is not None):
            raise ValueError(f"pair {index} is a text and token ids: give two of a kind")
        if is_ids != (pairs[0][0].token_ids is not None):
            raise ValueError(
                f"pairs 0 and {index} are texts and token ids: give one kind in a call"
            )
        if is_ids and has_template:
            raise ValueError(
                f"pair {index} is token ids and chat_template is given, which takes texts: give "
                "texts, or leave chat_template out"
            )
        if one.cache_salt != two.cache_salt:
            raise ValueError(
                f"pair {index} has the cache_salts {shown(one.cache_salt)} and "
                f"{shown(two.cache_salt)}: give both the same, as they become one prompt"
            )


def _joined_texts(
    texts: Sequence[tuple[str, str]],
    tokenizer: Tokenizer | None,
    pooler: "PoolerConfig",
    chat_template: str | None,
) -> list[TokenPrompt]:
    """One prompt of each pair of texts; arguments as `joined`."""
    if chat_template is not None:
        rendering = Rendering(chat_template=chat_template, add_generation_prompt=False)
        return [
            chat_prompt(
                tokenizer,
                [{"role": "query", "content": one}, {"role": "document", "content": two}],
                rendering,
            )
            for one, two in texts
        ]
    if pooler.joins_pairs:
        return tokenize([Prompt(one + two, None) for one, two in texts], tokenizer)
    ids = existing(tokenizer).encode_pairs(texts)
    return [TokenPrompt(f"{one}{two}", each) for (one, two), each in zip(texts, ids, strict=True)]
