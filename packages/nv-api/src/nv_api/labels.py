"""Labels: the facts about a tokenizer in the files beside tokenizer.json.

Owns the names of the special tokens (such as `eos_token`), the tokens that were added after
tokenizer.json was written, and which file wins. Never decides how a text is cut into tokens: only
tokenizer.json does, whatever class tokenizer_config.json names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nv_engine.user_line import warn_user
from nv_engine.values import shown
from nv_models.fields import read_json
from nv_models.listing import first_few
from nv_models.missing import is_there
from tokenizers import AddedToken

CONFIG, NAMES, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
DECODER = "added_tokens_decoder"
"""The key of CONFIG in which newer files list the added tokens by id."""
EXTRA = ("additional_special_tokens", "extra_special_tokens")
NAMED = "_token"
"""The end of a special token's name; other names may be those of arguments of transformers."""
KEPT = (
    "model_max_length",
    "clean_up_tokenization_spaces",
    "padding_side",
    "truncation_side",
    "model_input_names",
)
"""Values of tokenizer_config.json that do not change tokens."""

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Fields of an added token: how texts are searched for it, and whether texts omit it."""


@dataclass(frozen=True)
class Labels:
    """Names of tokens, and values of transformers' tokenizer that do not change tokens.

    Args:
        special: the text of each named special token: {"eos_token": "<|im_end|>", ...}.
        extra: texts of special tokens without a name of their own.
        added: tokens that were added after tokenizer.json was written, by id.
        values: keywords of transformers' tokenizer (`KEPT`).
    """

    special: Mapping[str, str]
    extra: tuple[str, ...]
    added: Mapping[int, AddedToken]
    values: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "Labels":
        """Read a folder's files, each of which may be missing.

        If two files name a token, the order is that of transformers: special_tokens_map.json wins
        over an older tokenizer_config.json, which has no `added_tokens_decoder`, and loses to a
        newer one.

        Raises:
            ValueError: a file that is not JSON, or a token that is not a text.
        """
        config, names, added = (
            read_json(folder / name) if is_there(folder / name) else {}
            for name in (CONFIG, NAMES, ADDED)
        )
        names_place = f"{folder / CONFIG} or {NAMES}"
        is_older = DECODER not in config
        both = {**config, **names} if is_older else {**names, **config}
        texts = {key: value for key, value in both.items() if key.endswith(NAMED)}
        extra: list[str] = []
        for key in EXTRA:
            match both.get(key) or []:
                case dict() as named:
                    texts |= {n: token for n, token in named.items() if n.endswith(NAMED)}
                    others = {n: token for n, token in named.items() if not n.endswith(NAMED)}
                    extra += [_text(names_place, n, token) for n, token in others.items()]
                    _warn_of_names(f"{names_place}: {key}", others)
                case list() as listed:
                    extra += [_text(names_place, key, token) for token in listed]
                case other:
                    raise ValueError(f"{names_place}: {key} is {shown(other)}: it must be a list")
        special = {
            name: _text(names_place, name, token)
            for name, token in texts.items()
            if token is not None and not isinstance(token, bool)  # add_bos_token is a flag
        }
        older = {
            index: {"content": text, "special": text in {*special.values(), *extra}}
            for text, index in added.items()
        }
        newer, place = config.get(DECODER), f"{folder / CONFIG}: {DECODER}"
        if not isinstance(newer, Mapping | None):
            raise ValueError(f"{place} is {shown(newer)}: it must be an object, from ids to tokens")
        return cls(
            special=special,
            extra=tuple(extra),
            added=_added(newer, place) if newer else _added(older, str(folder / ADDED)),
            values={key: config[key] for key in KEPT if config.get(key) is not None},
        )


def _warn_of_names(place: str, named: Mapping[str, object]) -> None:
    """Warn of special tokens whose names do not reach the chat template."""
    if named:
        warn_user(
            f"{place} has the name {', '.join(map(shown, first_few([*named])))}, which a chat "
            f"template does not get: only names that end in {NAMED} are read"
        )


def _text(place: str, name: str, token: object) -> str:
    """The text of a token that may be written as a string or as an AddedToken's fields."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise ValueError(
            f"{place}: {name} is {shown(token)}: it must be a text, or an object with a text as "
            "its content"
        )
    return text


def _added(listed: Mapping[Any, Any], place: str) -> dict[int, AddedToken]:
    """Added tokens in the order of their ids.

    Args:
        listed: a text, or an AddedToken's fields, of each id.
        place: where they are, for errors.

    Raises:
        ValueError: an id that is not an integer, a token without a text, or a flag that is none.
    """
    added = {}
    for index, token in listed.items():
        if not str(index).isdecimal():
            raise ValueError(
                f"{place}: an added token has the id {shown(index)}: it must be an integer from 0"
            )
        text = _text(place, f"added token {index}", token)
        flags = {} if isinstance(token, str) else {n: token[n] for n in FLAGS if n in token}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise ValueError(
                    f"{place}: {name} of added token {index} is {shown(flag)}: it must be true or "
                    "false"
                )
        added[int(index)] = AddedToken(text, **flags)
    return dict(sorted(added.items()))
