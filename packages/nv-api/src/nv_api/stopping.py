"""StopStrings: where a text ends because it said a stop string.

Owns the search across tokens and the text held back while a stop string may be under way; never
decodes tokens and never aborts a request.
"""

from typing import NamedTuple


class Stopped(NamedTuple):
    """What one piece of text came to: what may be shown, and the stop string found, if any."""

    text: str
    stop: str | None


class StopStrings:
    """Search a text, piece by piece, for the first of several stop strings.

    The stop string that is complete first wins (of two that end together, the longer), so the
    result does not depend on how the text was cut into pieces. Text that may be the beginning of a
    stop string is held back until it is known not to be: what `push` shows is never taken back.
    A piece costs O(its length + the longest stop string), however long the text has grown.

    Args:
        stops: the stop strings, none of them empty.
        include: keep the stop string in the text.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self.held = ""
        """Text that may be the beginning of a stop string: all that a search depends on."""

    def push(self, piece: str, *, armed: bool = True) -> Stopped:
        """Add a piece of text and return what may be shown.

        Args:
            piece: the text that follows what was pushed before.
            armed: False while no stop string may end here yet (`min_tokens`); one that began
                in such a piece may still end in a later one.
        """
        text = self.held + piece
        found = self._first(text) if armed else None
        if found is not None:
            start, stop = found
            self.held = ""
            return Stopped(text[: start + len(stop) if self._include else start], stop)
        shown = len(text) - self._undecided(text)
        self.held = text[shown:]
        return Stopped(text[:shown], None)

    def flush(self) -> str:
        """The text held back, once nothing can follow it."""
        held, self.held = self.held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """Start and stop string of the match that ends first; if two do, the longer.

        One that ends in the text held back is over: it was not armed then.
        """
        num_held = len(self.held)
        matches = [
            (start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(0, num_held - len(stop) + 1))) >= 0
        ]
        return min(matches, key=lambda m: (m[0] + len(m[1]), m[0]), default=None)

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with, whole ones apart."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if self._begins_a_stop(text[-n:])), 0)

    def _begins_a_stop(self, end: str) -> bool:
        return any(stop.startswith(end) and stop != end for stop in self._stops)
