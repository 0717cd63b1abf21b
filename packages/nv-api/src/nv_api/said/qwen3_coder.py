"""Qwen3CoderCall: a call as Qwen3-Coder writes it, tags with a plain text for each parameter.

Owns `<function=name>`, `<parameter=key>` and the texts between them, which it turns into JSON by
the types of the function's schema. A text may hold any tag but `</parameter>`.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from nv_api.said.functions import Function, json_type
from nv_api.said.tags import TagSearch

FUNCTION, PARAMETER = "<function=", "<parameter="
FUNCTION_ENDS = "</function>"
CALL_ENDS = "</tool_call>"
_MAX_NAME = 256
"""Characters of a function's or a parameter's name."""
_NAME = re.compile(rf"([^<>\n]{{1,{_MAX_NAME}}})>")
_NAME_BEGUN = re.compile(rf"[^<>\n]{{0,{_MAX_NAME}}}")
# Without its own closing tag, a text ends where the call does.
_VALUE_ENDS = TagSearch(
    *(
        space + tag
        for tag in ("</parameter>", f"{FUNCTION_ENDS}\n{CALL_ENDS}")
        for space in ("\n", "")
    )
)
_Read: TypeAlias = Callable[[list[str]], tuple[bool, str | None]]
"""Reads one tag or text, and adds to the arguments; returns whether more can be read, and the text
after the call if it is over."""


class Qwen3CoderCall:
    """The inside of one call; see `Dialect`.

    A text of type "string" is passed on as it comes; one of another type when it is complete. A
    text that fits none of its types becomes a JSON string, so the arguments are always JSON.
    """

    def __init__(self, functions: Sequence[Function]) -> None:
        self.name: str | None = None
        self.is_whole = False
        self._functions = {function.name: function for function in functions}
        self._function = Function("")
        self._given_name = ""
        self._held: list[str] = []
        self._unread = ""
        self._read: _Read = self._before_function
        self._num_parameters = 0
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []
        self._is_at_value = False

    @property
    def held(self) -> str:
        """Text that is content if the call breaks here."""
        return "".join(self._held)

    def push(self, piece: str) -> tuple[str, str | None]:
        """Read the next piece; see `Dialect`."""
        self._unread += piece
        if self.name is None:
            self._held.append(piece)
        arguments: list[str] = []
        rest, is_read = None, True
        while is_read and rest is None:
            is_read, rest = self._read(arguments)
        if rest is not None and self.name is None:
            self._held = [self.held[: -len(rest) or None]]
        return "".join(arguments), rest

    def finish(self) -> str:
        """The end of a text that was cut; see `Dialect`."""
        if self._read != self._in_value:
            return ""
        text = self._unread
        return _escaped(text) if self._is_text else "".join(self._value) + text

    @property
    def _is_text(self) -> bool:
        return self._types == {"string"}

    def _before_function(self, _arguments: list[str]) -> tuple[bool, str | None]:
        """Read `<function=name>`."""
        name, is_open = self._opening(FUNCTION)
        if name is None:
            return False, None if is_open else self._unread
        self._given_name = name
        self._function = self._functions.get(name, Function(name))
        self._read = self._before_parameter
        return True, None

    def _before_parameter(self, arguments: list[str]) -> tuple[bool, str | None]:
        """Read `<parameter=key>`, or the end of the function."""
        name, is_open = self._opening(PARAMETER)
        if name is not None:
            self._begin()
            arguments.append("{" if self._num_parameters == 0 else ", ")
            arguments.append(f"{json.dumps(name, ensure_ascii=False)}: ")
            self._num_parameters += 1
            self._types = self._function.types(name)
            if self._is_text:
                arguments.append('"')
            self._is_at_value = True
            self._read = self._in_value
            return True, None
        text = self._unread
        for end in (FUNCTION_ENDS, CALL_ENDS):
            if text.startswith(end):
                self._begin()
                rest = text.removeprefix(FUNCTION_ENDS)
                return True, self._ended(arguments, rest)
            is_open = is_open or end.startswith(text)
        return False, None if is_open else self._unread

    def _in_value(self, arguments: list[str]) -> tuple[bool, str | None]:
        """Read a parameter's text, without the newlines next to its tags."""
        if self._is_at_value and self._unread:
            self._unread = self._unread.removeprefix("\n")
            self._is_at_value = False
        before, tag, self._unread = _VALUE_ENDS.cut(self._unread)
        if self._is_text:
            arguments.append(_escaped(before))
        else:
            self._value.append(before)
        if not tag:
            return False, None
        if self._is_text:
            arguments.append('"')
        else:
            arguments.append(_typed("".join(self._value), self._types))
            self._value.clear()
        self._read = self._before_parameter
        if tag.endswith(CALL_ENDS):
            return True, self._ended(arguments, CALL_ENDS + self._unread)
        return True, None

    def _opening(self, tag: str) -> tuple[str | None, bool]:
        """The name in an opening tag, after white space; without one, whether it may follow."""
        text = self._unread = self._unread.lstrip()
        if not text.startswith(tag):
            return None, tag.startswith(text)
        found = _NAME.match(text, len(tag))
        if found is None:
            begun = _NAME_BEGUN.match(text, len(tag))
            assert begun is not None
            return None, begun.end() == len(text)
        self._unread = text[found.end() :]
        return found[1], True

    def _begin(self) -> None:
        self.name = self._given_name
        self._held.clear()

    def _ended(self, arguments: list[str], rest: str) -> str:
        arguments.append("}" if self._num_parameters else "{}")
        self.is_whole = True
        return rest


def _escaped(text: str) -> str:
    """A text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _typed(text: str, types: frozenset[str]) -> str:
    """A parameter's text as JSON of one of its types; the text as a JSON string if it fits none."""
    given = text.strip()
    lower = given.lower()
    if "null" in types and lower in ("null", "none"):
        return "null"
    if "boolean" in types and lower in ("true", "false"):
        return lower
    try:
        value = json.loads(given, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = json_type(value)
    if kind in types - {"string"} or (kind == "integer" and "number" in types):
        return given
    if "integer" in types and isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
