"""Qwen3Thoughts: the reasoning of Qwen3, `<think>…</think>` at the beginning of an answer.

Owns the text of a thought, without its tags and the newlines next to them. Thoughts are never
searched for calls.
"""

from nv_api.said.events import Content, Event, Thought
from nv_api.said.scope import CLOSE, OPEN, Place, ThoughtScope, place_after
from nv_api.said.tags import Passage, TagSearch

_CLOSES = TagSearch(CLOSE)


class Qwen3Thoughts:
    """Parts a text into a thought and content.

    Args:
        place: where the text begins; see `place_after`.
    """

    opens, closes = OPEN, CLOSE
    place_after = staticmethod(place_after)

    def __init__(self, place: Place) -> None:
        self._scope = ThoughtScope(place)
        self._thought = Passage(_CLOSES, "\n", is_at_tag=place is not Place.INSIDE)
        self._is_open = place in (Place.OPENED, Place.INSIDE)
        self._is_after_tag = False

    @property
    def is_over(self) -> bool:
        """Whether all text that follows is content, as it is."""
        return self._scope.is_over and not self._is_after_tag

    def push(self, piece: str) -> list[Event]:
        """Read the next piece; return `Thought` and `Content` events."""
        if self._scope.is_inside and self._thought.passes(piece):  # nearly always in a thought
            return [Thought(piece)]
        thought, rest = self._scope.push(piece)
        events: list[Event] = []
        if thought:
            events += self._thinking(thought)
        if self._is_after_tag:
            rest = rest.lstrip("\n")
            self._is_after_tag = not rest
        if rest:
            events.append(Content(rest))
        return events

    def finish(self) -> list[Event]:
        """Return what was held back, at the end of the text."""
        held = self._thought.finish()
        events: list[Event] = [Thought(held)] if held else []
        _, rest = self._scope.finish()
        return [*events, Content(rest)] if rest else events

    def _thinking(self, text: str) -> list[Event]:
        if not self._is_open:  # the scope returns the opening tag in one part
            self._is_open = True
            text = text[text.index(OPEN) + len(OPEN) :]
        passed = self._thought.push(text)
        self._is_after_tag = bool(passed.tag)
        return [Thought(passed.text)] if passed.text else []
