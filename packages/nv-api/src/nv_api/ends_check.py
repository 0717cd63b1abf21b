"""Ends check: which tokens end a text by a checkpoint's files, and whether they can be right.

Owns the warnings for folders. Those for GGUF files are made where their keys are read
(`nv_models.checkpoint.gguf.ends`).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from nv_engine.user_line import warn_user
from nv_models import ModelConfig
from nv_models.checkpoint.gguf.ends import is_plain_text
from nv_models.checkpoint.gguf.folder import source_of
from nv_models.fields import read_json
from nv_models.listing import first_few
from nv_models.missing import is_there
from nv_models.read_config import eos_ids

from nv_api.tokenizer import Tokenizer

FIX = "correct it there, or pass ignore_eos=True and stop_token_ids"


def check_ends(folder: Path, config: ModelConfig, tokenizer: Tokenizer, place: Path | str) -> None:
    """Check the tokens that end a text.

    Args:
        folder: of the model, the result of `resolve`.
        config: of the same folder.
        tokenizer: of the model, or the one that the user gave.
        place: of the tokenizer.

    Warns:
        UserWarning: one of them is a part of ordinary text; or there is none.
    """
    if source_of(folder) != folder:
        return
    plain: dict[str, list[str]] = {}
    for name, token in dict.fromkeys(_named(folder, config, tokenizer, place)):
        text = tokenizer.backend.convert_ids_to_tokens(token)
        if isinstance(text, str) and is_plain_text(text):
            plain.setdefault(name, []).append(f"{token}, the token {text!r}")
    for name, tokens in plain.items():
        warn_user(
            f"{name} is {'; '.join(first_few(tokens))}, which is a part of ordinary text: an "
            f"answer ends where it comes; {FIX}"
        )
    if not config.ends(tokenizer.eos_token_ids):
        warn_user(
            f"{folder} names no EOS (eos_token_id of config.json and generation_config.json, "
            "eos_token of tokenizer_config.json): texts end at max_tokens or a stop string only; "
            "add it to generation_config.json, or pass stop_token_ids"
        )


def _named(
    folder: Path, config: ModelConfig, tokenizer: Tokenizer, place: Path | str
) -> Iterator[tuple[str, int]]:
    """The ids that end a text, each with the place that names it."""
    for file in (folder / "config.json", folder / "generation_config.json"):
        named: Iterable[int] = eos_ids(read_json(file)) if is_there(file) else ()
        for token in named:
            yield f"{file}: eos_token_id", token
    for token in tokenizer.eos_token_ids:
        yield f"{place}: the id of the tokenizer's eos_token", token
    if not config.names_eos and not tokenizer.eos_token_ids:
        for token in config.eos_token_ids:
            missing = f"{folder / 'config.json'}: eos_token_id is missing, and its default for"
            yield f"{missing} {config.architecture}", token
