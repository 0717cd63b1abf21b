"""Lora modules: the adapters that a server is started with.

Owns the two forms of `--lora-modules`, the checks of their files before a model is loaded, and the
room that the engine needs for them. Never adds one to an engine.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nv_engine import EngineConfig, LoRARequest
from nv_engine.values import shown, whole
from nv_models.adapters import largest_rank

from nv_api.server.options import ServeOptions

FORMS = 'NAME=PATH, or JSON such as {"name": "poet", "path": "path/to/poet"}'
FIELDS = ("name", "path", "base_model_name")
"""Of the JSON form; vLLM's."""


def lora_modules(texts: Sequence[str]) -> tuple[LoRARequest, ...]:
    """The adapters of a command line, with ids from 1.

    Raises:
        ValueError: a text of neither form.
    """
    return tuple(_module(text, number) for number, text in enumerate(texts, 1))


def _module(text: str, number: int) -> LoRARequest:
    if text.lstrip().startswith("{"):
        return _module_of_json(text, number)
    name, _, path = text.partition("=")
    if not (name and path):
        raise ValueError(f"lora_modules has {shown(text)}: each must be {FORMS}")
    return LoRARequest(name, number, path)


def _module_of_json(text: str, number: int) -> LoRARequest:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(
            f"lora_modules has {shown(text)}, which is not JSON: each must be {FORMS}"
        ) from None
    if more := [name for name in found if name not in FIELDS]:
        raise ValueError(
            f"lora_modules has {shown(text)} with {shown(more[0])}: leave it out, the fields are "
            f"{', '.join(FIELDS)}"
        )
    try:
        return LoRARequest(
            found.get("name"), number, found.get("path"), found.get("base_model_name")
        )
    except ValueError as error:
        raise ValueError(f"lora_modules has {shown(text)}: {_renamed(str(error))}") from None


def _renamed(message: str) -> str:
    """An error of a LoRARequest, with the names of the JSON form."""
    return message.removeprefix("lora_")


def with_room(given: Mapping[str, Any], options: ServeOptions) -> dict[str, Any]:
    """The engine's options, with room for a server's adapters; their files are checked.

    Without `enable_lora` it is set, and without `max_lora_rank` the largest rank, if that is more
    than the default.

    Args:
        given: options as of `LLM`.
        options: of the server.

    Raises:
        ValueError: an adapter's files are not there, cannot be read or are not of LoRA; or the
            options leave it no room.
    """
    modules = options.lora_modules
    if not modules:
        if options.allow_runtime_lora_updating and not given.get("enable_lora"):
            raise ValueError(
                "allow_runtime_lora_updating is True and the engine has no room for adapters: give "
                "--enable-lora too"
            )
        return dict(given)
    if not given.get("enable_lora", True):
        raise ValueError(
            "enable_lora is False and lora_modules needs it: leave one of the two options out"
        )
    ranks = [_rank(module) for module in modules]
    largest, asked = max(ranks), given.get("max_lora_rank")
    if asked is None:
        wanted = {"max_lora_rank": largest} if largest > EngineConfig.max_lora_rank else {}
        return {**given, **wanted, "enable_lora": True}
    own = whole(asked)
    if own is not None and largest > own:
        name = modules[ranks.index(largest)].lora_name
        raise ValueError(
            f"lora_modules {name}: its largest rank is {largest} and max_lora_rank is {own}: give "
            f"--max-lora-rank {largest}, or leave that out"
        )
    return {**given, "enable_lora": True}


def _rank(module: LoRARequest) -> int:
    """The largest rank of an adapter; an error names the option."""
    try:
        return largest_rank(module.lora_path)
    except (ValueError, OSError) as error:
        raise ValueError(f"lora_modules {module.lora_name}: {error}") from error
