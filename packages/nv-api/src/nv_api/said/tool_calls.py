"""ToolCalls: the calls of functions in the content of an answer.

Owns the text around calls, and their numbers and ids. The inside of a call has a dialect, a class
of its own (`Dialect`).

The rules of a call, in every dialect:
- It begins when its name is known and its arguments begin or are known to be empty.
- Text that turns out not to be a call before that is content, with its tag and white space.
- What was sent stands. A call that breaks later, or is cut, ends with the arguments that came: not
  complete JSON, so no client uses them by mistake. The arguments of a whole call are an object.
- Tags, and the white space next to them, are not content.
"""

import secrets
import string
from collections.abc import Callable, Sequence
from typing import Protocol

from nv_api.said.events import Arguments, CallBegun, CallEnded, Content, Event
from nv_api.said.functions import Function
from nv_api.said.tags import Passage, TagSearch

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_OPENS = TagSearch(OPEN)
_ANY = TagSearch(OPEN, CLOSE)
_SPACE = " \t\r\n"
_ID_CHARACTERS = string.ascii_letters + string.digits


class Dialect(Protocol):
    """The inside of one call, after its opening tag."""

    name: str | None
    """The function's name; None until the call begins."""
    is_whole: bool
    """Whether the arguments that were returned are complete."""

    def __init__(self, functions: Sequence[Function]) -> None: ...

    def push(self, piece: str) -> tuple[str, str | None]:
        """Read the next piece.

        Returns:
            New text of the arguments, and the text after the call; None while it goes on.
        """

    def finish(self) -> str:
        """The last text of the arguments, where the text ends inside the call."""

    @property
    def held(self) -> str:
        """Text that was read and is neither in the arguments nor known to be syntax."""


def new_id() -> str:
    """An id for a call, as OpenAI's."""
    return "call_" + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(24))


class ToolCalls:
    """Parts content into text and calls.

    Args:
        dialect: the class that reads the inside of a call.
        functions: the functions that may be called, for the types of their parameters.
        ids: returns the id of each call.
        is_forced: the content is calls and nothing else, so that an end which was cut off is a part
            of a call.
    """

    def __init__(
        self,
        dialect: type[Dialect],
        functions: Sequence[Function] = (),
        ids: Callable[[], str] = new_id,
        *,
        is_forced: bool = False,
    ) -> None:
        self._dialect = dialect
        self._functions = functions
        self._ids = ids
        self._is_forced = is_forced
        self._passage = Passage(_OPENS, "\n", is_at_tag=False)
        self._call: Dialect | None = None
        self._opening = ""
        self._index = -1
        self._is_begun = False
        self.num_whole = 0
        """Calls that are whole."""

    @property
    def num_held(self) -> int:
        """Letters that may become content or a tag; 0 within a call."""
        return self._passage.num_held if self._call is None else 0

    def passes(self, piece: str) -> bool:
        """Whether a piece is content as it is, and changes nothing."""
        return self._call is None and self._passage.passes(piece)

    def push(self, piece: str) -> list[Event]:
        """Read the next piece of the content."""
        if self.passes(piece):  # nearly always
            return [Content(piece)]
        events: list[Event] = []
        rest: str | None = piece
        while rest is not None:
            if self._call is None:
                rest = self._outside(rest, events)
            else:
                rest = self._inside(self._call, rest, events)
        return events

    def finish(self) -> list[Event]:
        """Return what was held back, at the end of the text."""
        events: list[Event] = []
        call = self._call
        if self._is_forced and not (call and self._is_begun):
            return []
        if call is None:
            _add(events, self._passage.finish())
        elif self._is_begun:
            if arguments := call.finish():
                events.append(Arguments(self._index, arguments))
            self._end(call, events)
        else:
            _add(events, self._opening + call.held)
            self._call = None
        return events

    def _outside(self, piece: str, events: list[Event]) -> str | None:
        """Read text outside of calls; return the text after a tag, or None."""
        passed = self._passage.push(piece)
        _add(events, passed.text)
        if not passed.tag:
            return None
        if passed.tag == OPEN:
            self._call, self._is_begun = self._dialect(self._functions), False
            self._opening = passed.space + passed.tag
        else:
            self._passage = Passage(_OPENS, "\n", is_at_tag=True)
        return passed.rest

    def _inside(self, call: Dialect, piece: str, events: list[Event]) -> str | None:
        """Read text inside a call; return the text after it, or None while it goes on."""
        arguments, rest = call.push(piece)
        if call.name is not None and not self._is_begun:
            self._is_begun = True
            self._index += 1
            events.append(CallBegun(self._index, self._ids(), call.name))
        if arguments:
            events.append(Arguments(self._index, arguments))
        if rest is None:
            return None
        if self._is_begun:
            self._end(call, events)
            left = call.held.lstrip(_SPACE)
            self._passage = Passage(_ANY, _SPACE, is_at_tag=not left)
        else:
            left = self._opening + call.held
            self._passage = Passage(_OPENS, "\n", is_at_tag=False)
            self._call = None
        _add(events, left)
        return rest

    def _end(self, call: Dialect, events: list[Event]) -> None:
        self._call = None
        self.num_whole += call.is_whole
        events.append(CallEnded(self._index, call.is_whole))


def _add(events: list[Event], text: str) -> None:
    if text:
        events.append(Content(text))
