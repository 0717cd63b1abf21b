"""Tools: the functions that a request lets the model call, and how.

Owns the fields tools, tool_choice and parallel_tool_calls. Never reads a call.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nv_engine.values import shown

from nv_api.said import Function
from nv_api.server.errors import ApiError, invalid, unsupported
from nv_api.server.protocol.chat import ChatRequest

MAX_NAME = 256
"""Characters of a function's name."""
_NOT_IN_NAMES = frozenset("<>")
"""Characters that dialects write around a name."""


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The functions that an answer may call.

    Attributes:
        functions: by their place in `tools`; empty: none.
        is_forced: the answer is calls and nothing else.
        is_named: it is a call of the one function that the request names.
        is_single: it has at most one call.
    """

    functions: Mapping[int, Function] = field(default_factory=dict)
    is_forced: bool = False
    is_named: bool = False
    is_single: bool = False

    @property
    def finish_reason(self) -> str:
        """The reason for which an answer with calls finished, as OpenAI has it."""
        return "stop" if self.is_named else "tool_calls"


def tools_of(asked: ChatRequest) -> Tools:
    """The tools of a request.

    Raises:
        ApiError: 400, a tool is not a function, or the choice is not one of them.
    """
    functions = {i: _function(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools or [])}
    choice = asked.tool_choice
    if choice == "none":
        return Tools()
    is_single = asked.parallel_tool_calls is False
    if choice in (None, "auto"):
        return Tools(functions=functions, is_single=is_single)
    if choice != "required" and not isinstance(choice, dict):
        raise _wrong(choice)
    if not functions:
        raise invalid(
            f"tool_choice is {shown(choice)} and there are no tools: give tools", "tool_choice"
        )
    if choice == "required":
        return Tools(functions=functions, is_forced=True, is_single=is_single)
    name = _named(choice)
    named = {i: each for i, each in functions.items() if each.name == name}
    if not named:
        names = ", ".join(shown(each.name) for each in functions.values())
        raise invalid(
            f"tool_choice names {shown(name)}, which is not in tools: they have {names}",
            "tool_choice",
        )
    index = min(named)
    return Tools(functions={index: named[index]}, is_forced=True, is_named=True, is_single=True)


def _named(choice: Mapping[str, Any]) -> str:
    """The function's name in a choice."""
    if choice.get("type", "function") != "function":
        raise unsupported(
            f"tool_choice.type is {shown(choice.get('type'))}: only 'function' is built",
            "tool_choice",
        )
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _wrong(choice)
    return name


def _wrong(choice: object) -> ApiError:
    return invalid(
        f"tool_choice is {shown(choice)}: it must be none, auto, required or an object with a "
        'function\'s name, {"type": "function", "function": {"name": …}}',
        "tool_choice",
    )


def _function(tool: Mapping[str, Any], place: str) -> Function:
    """One tool, which has a place in the request."""
    if tool.get("type", "function") != "function":
        raise unsupported(
            f"{place}.type is {shown(tool.get('type'))}: only 'function' is built", f"{place}.type"
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(
            f"{place}.function is {shown(function)}: it must be an object with a name",
            f"{place}.function",
        )
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _is_name(name):
        raise invalid(
            f"{place}.function.name is {shown(name)}: it must be a text of 1 to {MAX_NAME} "
            "characters without white space, < and >",
            f"{place}.function.name",
        )
    if not isinstance(description := function.get("description"), str | None):
        raise invalid(
            f"{place}.function.description is {shown(description)}: it must be a text",
            f"{place}.function.description",
        )
    if not isinstance(parameters, dict | None):
        raise invalid(
            f"{place}.function.parameters is {shown(parameters)}: it must be a JSON schema, which "
            "is an object",
            f"{place}.function.parameters",
        )
    check_strict(function, f"{place}.function")
    return Function(name, parameters)


def check_strict(given: Mapping[str, Any], place: str) -> None:
    """Refuse a `strict` of another type than boolean. Calls always have the form of their tool."""
    if not isinstance(strict := given.get("strict"), bool | None):
        raise invalid(
            f"{place}.strict is {shown(strict)}: it must be true or false", f"{place}.strict"
        )


def _is_name(name: str) -> bool:
    return (
        1 <= len(name) <= MAX_NAME
        and name.isprintable()
        and not any(char.isspace() for char in name)
        and _NOT_IN_NAMES.isdisjoint(name)
    )
