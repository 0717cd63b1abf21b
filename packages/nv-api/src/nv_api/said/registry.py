"""Registry: the parsers by name, and the ones that a chat template asks for.

A new parser is a file, and a line here.
"""

from typing import TypeVar

from nv_engine.values import shown

from nv_api.said.hermes import HermesCall
from nv_api.said.qwen3 import Qwen3Thoughts
from nv_api.said.qwen3_coder import Qwen3CoderCall
from nv_api.said.tool_calls import Dialect

REASONING_PARSERS: dict[str, type[Qwen3Thoughts]] = {
    "qwen3": Qwen3Thoughts,
}
TOOL_CALL_PARSERS: dict[str, type[Dialect]] = {
    "hermes": HermesCall,
    "qwen3_coder": Qwen3CoderCall,
}
_Parser = TypeVar("_Parser")


def reasoning_parser(name: str | None, template: str | None) -> type[Qwen3Thoughts] | None:
    """The reasoning parser of a name, or without one that of a chat template.

    Raises:
        ValueError: an unknown name.
    """
    if name is not None:
        return _named("reasoning_parser", name, REASONING_PARSERS)
    return Qwen3Thoughts if "</think>" in (template or "") else None


def tool_call_parser(name: str | None, template: str | None) -> type[Dialect] | None:
    """The dialect of tool calls of a name, or without one that of a chat template.

    Raises:
        ValueError: an unknown name.
    """
    if name is not None:
        return _named("tool_call_parser", name, TOOL_CALL_PARSERS)
    if "<tool_call>" not in (template or ""):
        return None
    return Qwen3CoderCall if "<function=" in (template or "") else HermesCall


def _named(option: str, name: str, parsers: dict[str, _Parser]) -> _Parser:
    if name not in parsers:
        raise ValueError(f"{option} is {shown(name)}: it must be one of {', '.join(parsers)}")
    return parsers[name]
