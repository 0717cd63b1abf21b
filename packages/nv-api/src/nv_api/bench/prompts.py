"""Prompts: the inputs of a benchmark, random or of a file.

Owns how they are drawn and read. Never sends one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from nv_engine.values import integer, shown
from nv_models.locate import DEMO, resolve

from nv_api.bench.load import CHAT, MAX_TOKENS, Load
from nv_api.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_OUTPUT = 256
"""Tokens of an answer where neither the file nor an option gives a number; vLLM's."""


@dataclass(frozen=True)
class Prompt:
    """One request's input.

    Attributes:
        content: a text, token ids, or the messages of a conversation.
        num_output: most tokens of the answer.
    """

    content: str | list[int] | list[dict[str, Any]]
    num_output: int


def read_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder, a .gguf file, a hub name or "demo"; no weights are downloaded.

    Raises:
        ValueError, OSError: it cannot be loaded; the text has the remedy.
    """
    try:
        return load_tokenizer(resolve(name) if name == DEMO or Path(name).is_file() else name)
    except (ValueError, OSError) as error:
        raise type(error)(
            f"random prompts need the model's tokenizer, and that of {shown(name)} was not found: "
            f"name a folder or a hub name with --tokenizer ({error})"
        ) from error


def random_prompts(load: Load, tokenizer: "PreTrainedTokenizerBase") -> list[Prompt]:
    """Prompts of random token ids; for a chat, their text, whose ids may be some more or less."""
    rng = np.random.default_rng(load.seed)
    allowed = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
    prefixes = rng.choice(allowed, (load.random_num_prefixes, load.random_prefix_len))
    inputs = _lengths(rng, load, load.random_input_len)
    outputs = _lengths(rng, load, load.random_output_len)
    prompts = []
    for num_input, num_output in zip(inputs, outputs, strict=True):
        prefix = prefixes[rng.integers(len(prefixes))]
        ids = [*prefix.tolist(), *rng.choice(allowed, num_input).tolist()]
        content = _conversation(str(tokenizer.decode(ids))) if load.backend == CHAT else ids
        prompts.append(Prompt(content, int(num_output)))
    return prompts


def file_prompts(path: Path, load: Load) -> list[Prompt]:
    """Prompts of a JSONL file, as many as the load has; a shorter file begins again.

    A line has `prompt` (a text or token ids) or, for a chat, `messages`; and `output_tokens`, if
    the answer's length is not that of `--output-len`.

    Raises:
        ValueError: the file is not UTF-8, or a line is not such an object; names the line.
        OSError: the file cannot be read.
    """
    default = load.output_len or DEFAULT_OUTPUT
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"dataset_path {path} is not UTF-8: write it anew") from error
    lines = text.split("\n")  # splitlines would also cut at U+2028, which JSON's texts may have
    found = [
        _prompt_of(f"{path}, line {number}", line, default, is_chat=load.backend == CHAT)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise ValueError(f"{path} has no prompts: it must have one JSON object per line")
    return [found[index % len(found)] for index in range(load.num_prompts)]


def _lengths(rng: np.random.Generator, load: Load, length: int) -> Sequence[int]:
    """Lengths around one, at least 1."""
    spread = int(length * load.random_range_ratio)
    low, high = max(1, length - spread), length + spread
    return rng.integers(low, high + 1, load.num_prompts)  # type: ignore[return-value]


def _conversation(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _prompt_of(place: str, line: str, default: int, *, is_chat: bool) -> Prompt:
    """The prompt of a line."""
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}") from None
    named = fields if isinstance(fields, dict) else {}
    content = named.get("messages") if is_chat and "messages" in named else named.get("prompt")
    if not isinstance(content, str | list) or not content:
        raise ValueError(
            f"{place} is {shown(fields)}: it must be an object with `prompt`"
            + (" or `messages`" if is_chat else "")
        )
    if is_chat and isinstance(content, str):
        content = _conversation(content)
    asked = named.get("output_tokens")
    num_output = default if asked is None else asked
    return Prompt(content, integer(f"{place}: output_tokens", num_output, 1, MAX_TOKENS))
