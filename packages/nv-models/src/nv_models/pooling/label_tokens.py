"""Label tokens: tokens of a head for tokens that stand for the labels of a classifier.

Owns the three keys of config.json that name them, which are vLLM's, and the look-up of their ids in
tokenizer.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nv_models.fields import flag, read_json, strings

TOKENS = "classifier_from_token"
TWO_WAY = "is_original_qwen3_reranker"


class LabelTokens(NamedTuple):
    """The labels' tokens."""

    ids: tuple[int, ...] = ()
    """(): the classifier has weights of its own."""
    is_two_way: bool = False
    """Whether two tokens are one label: the probability of the second against the first."""


def label_tokens(raw: Mapping[str, Any], folder: Path) -> LabelTokens:
    """The tokens that config.json names, if any.

    Raises:
        ValueError: a token that the tokenizer does not have, or not two where two are one label.
        FileNotFoundError: the folder has no tokenizer.json.
    """
    named, is_two_way = strings(raw, TOKENS), flag(raw, TWO_WAY)
    if is_two_way and len(named) != 2:
        raise ValueError(f'{TWO_WAY} is true: {TOKENS} must name two tokens, ["no", "yes"]')
    if not named:
        return LabelTokens()
    values = read_json(folder / "tokenizer.json")
    known: dict[str, int] = dict((values.get("model") or {}).get("vocab") or {})
    known |= {str(each["content"]): int(each["id"]) for each in values.get("added_tokens") or ()}
    unknown = [token for token in named if token not in known]
    if unknown:
        raise ValueError(
            f"{TOKENS} names {unknown[0]!r}, which {folder / 'tokenizer.json'} does not have"
        )
    return LabelTokens(tuple(known[token] for token in named), is_two_way)
