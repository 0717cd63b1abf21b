"""Prompts of pooling requests: a model's named prompts, truncation, and pairs of texts.

Owns how a text and its prompt, or two texts, become token ids. Never checks the ids: the engine
does.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nv_engine.values import shown

from nv_api.conversation import Rendering, chat_prompt
from nv_api.prompts import Prompt, TokenPrompt, tokenize
from nv_api.tokenizer import Tokenizer, existing

if TYPE_CHECKING:
    from nv_engine import PoolingParams
    from nv_models import PoolerConfig

WHOLE_CONTEXT = -1


def with_prompt(
    prompts: Sequence[Prompt], pooler: "PoolerConfig", name: str | None
) -> list[Prompt]:
    """Put a prompt of the model's in front of each text.

    Args:
        prompts: those of one call; token ids stay as they are.
        pooler: has the model's prompts.
        name: of the prompt; None: the model's default, if it has one.

    Raises:
        ValueError: an unknown name, or a name for token ids.
    """
    known = dict(pooler.prompts)
    if name is not None and name not in known:
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


def paired(first: Sequence[Prompt], second: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """As many first as second prompts: one first goes with each second.

    Raises:
        ValueError: there are none, or their numbers do not fit.
    """
    for name, side in (("data_1", first), ("data_2", second)):
        if not side:
            raise ValueError(f"{name} is empty: give at least one text")
    if len(first) == 1:
        first = list(first) * len(second)
    if len(first) != len(second):
        raise ValueError(
            f"data_1 has {len(first)} texts and data_2 {len(second)}: give one and any number, or "
            "as many of each"
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
        ValueError: a pair of a text and token ids, or texts without a tokenizer.
    """
    pairs = list(zip(first, second, strict=True))
    for index, pair in enumerate(pairs):
        if len({prompt.token_ids is None for prompt in pair}) > 1:
            raise ValueError(f"pair {index} is a text and token ids: give two of a kind")
    if first[0].token_ids is not None and chat_template is None:
        return [
            TokenPrompt(None, [*(one.token_ids or ()), *(two.token_ids or ())], one.cache_salt)
            for one, two in pairs
        ]
    texts = [(one.text or "", two.text or "") for one, two in pairs]
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
