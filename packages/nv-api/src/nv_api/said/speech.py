"""Speech: one completion's text as events.

Owns the order of the parsers (thoughts first, then the calls in the content) and the reason for
which the completion finished. Its text comes without stop strings.
"""

from typing import NamedTuple

from nv_api.said.events import Content, Event, joined
from nv_api.said.qwen3 import Qwen3Thoughts
from nv_api.said.tool_calls import ToolCalls


class Ending(NamedTuple):
    """The last events of a text, and the reason for which it finished."""

    events: list[Event]
    finish_reason: str


class Speech:
    """Reads a text in pieces of any size.

    However a text is cut, the joined events are the same.

    Args:
        thoughts: None where the model does not reason.
        calls: None where it cannot call functions; then tags of calls are content.
    """

    def __init__(self, thoughts: Qwen3Thoughts | None, calls: ToolCalls | None) -> None:
        self._thoughts = thoughts
        self._calls = calls

    def passes(self, piece: str) -> bool:
        """Whether a piece is content as it is, and changes nothing: it need not be pushed."""
        return self._thoughts is None and (self._calls is None or self._calls.passes(piece))

    def push(self, piece: str) -> list[Event]:
        """Read the next piece; neighbours of one kind are one event."""
        if not piece:
            return []
        if self._thoughts is None:
            return [Content(piece)] if self._calls is None else joined(self._calls.push(piece))
        events = joined(self._called(self._thoughts.push(piece)))
        if self._thoughts.is_over:
            self._thoughts = None
        return events

    def finish(self, reason: str, called: str = "tool_calls") -> Ending:
        """End the text.

        Args:
            reason: the engine's.
            called: the reason instead of "stop" if at least one call is whole; "stop" where the
                request named the function.
        """
        events: list[Event] = []
        if self._thoughts is not None:
            events = self._called(self._thoughts.finish())
        if self._calls is not None:
            events += self._calls.finish()
        has_called = self._calls is not None and self._calls.num_whole > 0
        return Ending(joined(events), called if has_called and reason == "stop" else reason)

    def _called(self, events: list[Event]) -> list[Event]:
        """The same events, with the calls of their content."""
        if self._calls is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._calls.push(event.text) if isinstance(event, Content) else [event]
        return found
