"""Tool calls: the functions that an assistant called, in the form that chat templates read.

Owns the ways to write a call and its arguments. Never reads the rest of a message.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from nv_engine.values import plain, shown

MOST_DEPTH = 64
"""Levels of dicts and lists in a call: a template walks over them by recursion."""
FUNCTION = "{'name': …, 'arguments': …}"
CALL = f"{{'type': 'function', 'function': {FUNCTION}}}"


def parsed_calls(calls: object, name: str) -> list[dict[str, Any]]:
    """Calls as new plain dicts, their arguments parsed.

    Args:
        calls: dicts, other mappings or pydantic models, each {"function": {"name", "arguments"}},
            or, without "function", {"name", "arguments"}.
        name: their name in errors.

    Raises:
        TypeError: a value that is not a list of calls.
        ValueError: a call without a name, or arguments that are not a JSON object.
    """
    listed = plain(calls)  # torch's and numpy's scalars call themselves iterable
    if isinstance(listed, str | Mapping) or not isinstance(listed, Iterable):
        raise TypeError(f"{name} is {shown(calls)}: it must be a list of calls, each {CALL}")
    return [_call(call, f"{name}[{i}]") for i, call in enumerate(listed)]


def parsed_function(function: object, name: str) -> dict[str, Any]:
    """A function's name and parsed arguments, as a plain dict; raises as `parsed_calls` does."""
    fields = _plain(function, name)
    if not isinstance(fields, dict):
        raise TypeError(f"{name} is {shown(function)}: it must be a dict, {FUNCTION}")
    if not isinstance(fields.get("name"), str) or not fields["name"]:
        raise ValueError(f"{name} is {shown(fields)} and names no function: it must be {FUNCTION}")
    return {**fields, "arguments": _arguments(fields.get("arguments"), f"{name}.arguments")}


def _call(call: object, name: str) -> dict[str, Any]:
    fields = _plain(call, name)
    if not isinstance(fields, dict):
        raise TypeError(f"{name} is {shown(call)}: it must be a dict, {CALL}")
    if "function" not in fields:
        return parsed_function(fields, name)
    return {**fields, "function": parsed_function(fields["function"], f"{name}.function")}


def _arguments(given: object, name: str) -> dict[str, Any]:
    """Arguments as a dict, from a dict or from JSON text; missing ones are an empty dict."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    try:
        arguments = json.loads(given, parse_constant=_refuse) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{name} is {shown(given)}, which is not JSON ({error}): give a dict, or the JSON text "
            "of an object"
        ) from error
    if not isinstance(arguments, dict):
        raise ValueError(
            f"{name} is {shown(given)}: it must be a dict, or the JSON text of an object such as "
            '\'{"city": "Oslo"}\''
        )
    return arguments if arguments is given else _plain(arguments, name)


def _refuse(constant: str) -> None:
    raise ValueError(f"it has {constant}")


def _plain(value: Any, name: str, room: int = MOST_DEPTH) -> Any:  # noqa: ANN401  # a user's
    """Mappings and pydantic models as dicts, lists and tuples as lists, at every depth.

    Raises:
        ValueError: `room` levels do not hold the value.
    """
    if room < 0:
        raise ValueError(f"{name} is nested over {MOST_DEPTH} levels deep: give fewer levels")
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {key: _plain(member, name, room - 1) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name, room - 1) for item in value]
    return value
