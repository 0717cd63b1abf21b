"""JSONObject: the text of a JSON object, followed character by character.

Owns the syntax (RFC 8259). It stops where a member of the outermost object begins or ends. Never
builds a value.
"""

import json
import re
from enum import Enum

MAX_DEPTH = 100
"""Most brackets that may be open at one point: parsers of clients have such bounds."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = re.compile(r"[ \t\n\r]*")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_DIGITS = frozenset("0123456789")
# Number: for each state, the next state by character; "9" is any digit from 1 to 9.
_NUMBERS: dict[str, dict[str, str]] = {
    "minus": {"0": "zero", "9": "whole"},
    "zero": {".": "point", "e": "e"},
    "whole": {"0": "whole", "9": "whole", ".": "point", "e": "e"},
    "point": {"0": "part", "9": "part"},
    "part": {"0": "part", "9": "part", "e": "e"},
    "e": {"0": "power", "9": "power", "+": "sign", "-": "sign"},
    "sign": {"0": "power", "9": "power"},
    "power": {"0": "power", "9": "power"},
}
_MAY_END = frozenset(["zero", "whole", "part", "power"])


class Mark(Enum):
    """Where `JSONObject.advance` stopped."""

    MORE = "more"
    """At the end of the text."""
    VALUE = "value"
    """Before the first character of a member's value; `key` is its name."""
    MEMBER = "member"
    """After the last character of a member's value."""
    END = "end"
    """After the object."""
    BROKEN = "broken"
    """Before a character that is not JSON."""


class JSONObject:
    """The place in the text of an object, which comes in pieces."""

    def __init__(self) -> None:
        self.key = ""
        """The name of the outermost object's newest member."""
        self._expected = "start"
        self._open: list[str] = []
        self._is_key = False
        self._key_text: list[str] = []
        self._number = ""
        self._left = ""  # of a literal: the characters that must follow
        self._num_hex = 0
        self._is_announced = False

    def advance(self, text: str, start: int) -> tuple[int, Mark]:
        """Follow `text` from `start` on; return where this stopped, and why."""
        position, length = start, len(text)
        while position < length:
            if self._expected == "string":
                plain = _PLAIN.match(text, position)
                assert plain is not None
                self._note(plain[0])
                position = plain.end()
                if position == length:
                    break
            elif self._expected in _BETWEEN:
                space = _SPACE.match(text, position)
                assert space is not None
                position = space.end()
                if position == length:
                    break
            char = text[position]
            if self._expected == "number" and not self._continues_number(char):
                if self._number not in _MAY_END:
                    return position, Mark.BROKEN
                if self._end_value():
                    return position, Mark.MEMBER
                continue
            if self._is_new_member():
                return position, Mark.VALUE
            mark = _STATES[self._expected](self, char)
            if mark is Mark.BROKEN:
                return position, mark
            position += 1
            if mark is not Mark.MORE:
                return position, mark
        return position, Mark.MORE

    def _is_new_member(self) -> bool:
        """Announce the value of a member of the outermost object, once."""
        is_new = self._expected == "value" and self._open == ["{"] and not self._is_announced
        self._is_announced = is_new
        return is_new

    def _note(self, text: str) -> None:
        """Keep the text of a key of the outermost object."""
        if self._is_key and len(self._open) == 1:
            self._key_text.append(text)

    def _end_value(self) -> bool:
        """A value is over: what follows it; return whether it is a member's."""
        self._expected = "next"
        return len(self._open) == 1

    def _ended(self) -> Mark:
        return Mark.MEMBER if self._end_value() else Mark.MORE

    def _at_start(self, char: str) -> Mark:
        return self._opened(char) if char == "{" else Mark.BROKEN

    def _at_value(self, char: str) -> Mark:
        if char == '"':
            self._expected, self._is_key = "string", False
        elif char in "{[":
            return self._opened(char)
        elif char in _LITERALS:
            self._expected, self._left = "literal", _LITERALS[char]
        elif char == "-" or char in _DIGITS:
            self._expected = "number"
            self._number = {"-": "minus", "0": "zero"}.get(char, "whole")
        else:
            return Mark.BROKEN
        return Mark.MORE

    def _opened(self, char: str) -> Mark:
        if len(self._open) == MAX_DEPTH:
            return Mark.BROKEN
        self._open.append(char)
        self._expected = "first key" if char == "{" else "first item"
        return Mark.MORE

    def _closed(self) -> Mark:
        self._open.pop()
        return self._ended() if self._open else Mark.END

    def _at_first_key(self, char: str) -> Mark:
        return self._closed() if char == "}" else self._at_key(char)

    def _at_key(self, char: str) -> Mark:
        if char != '"':
            return Mark.BROKEN
        self._expected, self._is_key = "string", True
        self._key_text.clear()
        return Mark.MORE

    def _at_first_item(self, char: str) -> Mark:
        return self._closed() if char == "]" else self._at_value(char)

    def _at_colon(self, char: str) -> Mark:
        self._expected = "value"
        return Mark.MORE if char == ":" else Mark.BROKEN

    def _at_next(self, char: str) -> Mark:
        is_object = self._open[-1] == "{"
        if char == ("}" if is_object else "]"):
            return self._closed()
        self._expected = "key" if is_object else "value"
        return Mark.MORE if char == "," else Mark.BROKEN

    def _in_string(self, char: str) -> Mark:
        if char == '"':
            return self._end_string()
        self._expected = "escape"
        self._note(char)
        return Mark.MORE if char == "\\" else Mark.BROKEN

    def _end_string(self) -> Mark:
        if not self._is_key:
            return self._ended()
        self._expected = "colon"
        if len(self._open) == 1:
            self.key = json.loads(f'"{"".join(self._key_text)}"')
        return Mark.MORE

    def _at_escape(self, char: str) -> Mark:
        self._note(char)
        if char == "u":
            self._expected, self._num_hex = "hex", 4
            return Mark.MORE
        self._expected = "string"
        return Mark.MORE if char in _ESCAPES else Mark.BROKEN

    def _at_hex(self, char: str) -> Mark:
        self._note(char)
        self._num_hex -= 1
        self._expected = "hex" if self._num_hex else "string"
        return Mark.MORE if char in _HEX else Mark.BROKEN

    def _in_literal(self, char: str) -> Mark:
        if char != self._left[0]:
            return Mark.BROKEN
        self._left = self._left[1:]
        return Mark.MORE if self._left else self._ended()

    def _continues_number(self, char: str) -> bool:
        kind = "9" if char in _DIGITS and char != "0" else char.lower()
        following = _NUMBERS[self._number].get(kind)
        self._number = following or self._number
        return following is not None

    def _in_number(self, _char: str) -> Mark:
        return Mark.MORE


_STATES = {
    "start": JSONObject._at_start,
    "value": JSONObject._at_value,
    "first key": JSONObject._at_first_key,
    "key": JSONObject._at_key,
    "first item": JSONObject._at_first_item,
    "colon": JSONObject._at_colon,
    "next": JSONObject._at_next,
    "string": JSONObject._in_string,
    "escape": JSONObject._at_escape,
    "hex": JSONObject._at_hex,
    "literal": JSONObject._in_literal,
    "number": JSONObject._in_number,
}
_BETWEEN = frozenset(["start", "value", "first key", "key", "first item", "colon", "next"])
