"""StopStrings: the end of a text at a stop string.

Owns the search across tokens, and the text held back while it may become a stop string. Never
decodes tokens and never aborts a request.
"""

from typing import Any, NamedTuple, Protocol


class Stopped(NamedTuple):
    """The result of one piece: the text that may be shown, and the stop string found, or None."""

    text: str
    stop: str | None


class StopSearch(Protocol):
    """The search for the end of a text.

    Attributes:
        state: everything that later pushes depend on. Setting an earlier state undoes the pushes
            since.
    """

    state: Any

    def push(self, piece: str, *, armed: bool = True) -> Stopped:
        """Add a piece of text; unless armed, no stop string ends here."""

    def flush(self, *, armed: bool = True) -> Stopped:
        """Return the text held back, at the end of the text."""


class StopStrings:
    """Search a text, piece by piece, for the first of several stop strings.

    The stop string that is complete first wins (of two that end together, the longer), so the
    result does not depend on how the text was cut into pieces. Text that may be the beginning of a
    stop string is held back until it is known not to be one: `push` returns final text only.
    A piece costs O(its length + the longest stop string), whatever the length of the text; one in
    which no stop string begins costs a look at its letters.

    Args:
        stops: the stop strings, none of them empty.
        include: keep the stop string in the text.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._stops = stops
        self._by_letter: dict[str, list[str]] = {}
        for stop in stops:
            self._by_letter.setdefault(stop[0], []).append(stop)
        self._letters = frozenset(self._by_letter)  # the first of each stop string
        self._most_held = max(map(len, stops), default=1) - 1
        self._include = include
        self.state = ""
        """Text held back, as it may begin a stop string; later pushes depend on nothing else."""

    def push(self, piece: str, *, armed: bool = True) -> Stopped:
        """Add a piece of text and return what may be shown.

        Args:
            piece: the text that follows what was pushed before.
            armed: False while a stop string must not end here (`min_tokens`); a stop string that
                begins in such a piece may end in a later one.
        """
        if not self.state and self._letters.isdisjoint(piece):  # most pieces
            return Stopped(piece, None)
        text = self.state + piece
        is_there = armed and any(map(text.__contains__, self._stops))  # seldom, and cheap to see
        found = self._first(text) if is_there else None
        if found is not None:
            start, stop = found
            self.state = ""
            return Stopped(text[: start + len(stop) if self._include else start], stop)
        shown = len(text) - self._undecided(text)
        self.state = text[shown:]
        return Stopped(text[:shown], None)

    def flush(self, *, armed: bool = True) -> Stopped:
        """Return the text held back, at the end of the text: it has no stop string."""
        held, self.state = self.state, ""
        return Stopped(held, None)

    def _first(self, text: str) -> tuple[int, str] | None:
        """Start and stop string of the match that ends first; if two do, the longer.

        A match that ends within the text held back does not count: it was not armed.
        """
        num_held = len(self.state)
        matches = [
            (start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(0, num_held - len(stop) + 1))) >= 0
        ]
        return min(matches, key=lambda m: (m[0] + len(m[1]), m[0]), default=None)

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        by_letter, most = self._by_letter, self._most_held
        tail = text[-most:] if most else ""
        for start, letter in enumerate(tail):
            if letter in by_letter:
                end = tail[start:]
                for stop in by_letter[letter]:
                    if stop.startswith(end) and len(stop) > len(end):
                        return len(end)
        return 0
