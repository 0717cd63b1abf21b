"""HermesCall: a call as Hermes and Qwen3 write it, a JSON object with name and arguments.

Owns the object `{"name": …, "arguments": {…}}`. Its arguments are passed on as they are written.
Other members, and a second name or arguments, are read and left out.
"""

import json
from collections.abc import Sequence

from nv_api.said.functions import Function
from nv_api.said.json_object import JSONObject, Mark
from nv_api.said.tags import Passage, TagSearch

_ENDS = TagSearch("<tool_call>", "</tool_call>")


class HermesCall:
    """The inside of one call; see `Dialect`.

    Arguments that break after the call began are passed on as they are, up to the closing tag (or
    the next opening one).
    """

    def __init__(self, _functions: Sequence[Function]) -> None:
        self.name: str | None = None
        self.is_whole = False
        self._object = JSONObject()
        self._member = ""  # the member whose value is read: "name", "arguments" or ""
        self._given_name = ""
        self._value: list[str] = []
        self._early: str | None = None  # arguments that came before the name
        self._held: list[str] = []
        self._broken: Passage | None = None

    @property
    def held(self) -> str:
        """Text that is content if the call breaks here."""
        return "".join(self._held)

    def push(self, piece: str) -> tuple[str, str | None]:
        """Read the next piece; see `Dialect`."""
        if self._broken is not None:
            return self._push_broken(self._broken, piece)
        arguments: list[str] = []
        position, rest = 0, None
        while rest is None and self._broken is None:
            start = position
            position, mark = self._object.advance(piece, start)
            self._take(piece[start:position], arguments)
            if mark is Mark.MORE:
                break
            rest = self._at(mark, piece[position:], arguments)
        return "".join(arguments), rest

    def finish(self) -> str:
        """The text that a broken call holds back; see `Dialect`."""
        return "" if self._broken is None else self._broken.finish()

    def _take(self, text: str, arguments: list[str]) -> None:
        """Sort new text: arguments, or text held back."""
        if self._member == "arguments" and self.name is not None:
            arguments.append(text)
            return
        self._held.append(text)
        if self._member:
            self._value.append(text)

    def _at(self, mark: Mark, following: str, arguments: list[str]) -> str | None:
        """Act at a mark; return the text after the call if it is over."""
        if mark is Mark.VALUE:
            return None if self._begin_member(following, arguments) else following
        if mark is Mark.MEMBER:
            return None if self._end_member(arguments) else following
        if mark is Mark.END:
            self._end_object(arguments)
            return following
        if self.name is None or self.is_whole:
            return following
        self._broken = Passage(_ENDS, "\n", is_at_tag=False)
        text, rest = self._push_broken(self._broken, following)
        arguments.append(text)
        return rest

    def _begin_member(self, following: str, arguments: list[str]) -> bool:
        """The value of a member begins; return whether it may."""
        key = self._object.key
        if key == "name" and not self._given_name:
            self._member = key
            return following[0] == '"'
        if key == "arguments" and self._early is None and not self.is_whole:
            if following[0] != "{":
                return following[0] == "n"  # null: there are none
            self._member = key
            if self._given_name:
                self._begin("", arguments)
        return True

    def _end_member(self, arguments: list[str]) -> bool:
        """The value of a member ended; return whether it may be what it is."""
        member, self._member = self._member, ""
        value = "".join(self._value)
        self._value.clear()
        if member == "name":
            self._given_name = json.loads(value)
            if self._early is not None and self._given_name:
                self._begin(self._early, arguments)
                self.is_whole = True
            return bool(self._given_name)
        if member == "arguments":
            self.is_whole = self.name is not None
            self._early = value
        return True

    def _begin(self, text: str, arguments: list[str]) -> None:
        self.name = self._given_name
        self._held.clear()
        arguments.append(text)

    def _end_object(self, arguments: list[str]) -> None:
        if self._given_name:
            if self.name is None:
                self._begin("{}", arguments)
            self.is_whole = True
            self._held.clear()

    def _push_broken(self, passage: Passage, piece: str) -> tuple[str, str | None]:
        """Read broken arguments, up to a tag, which is not read."""
        passed = passage.push(piece)
        return passed.text, passed.tag + passed.rest if passed.tag else None
