"""ThoughtScope: which part of a completion's text is a thought.

Owns the place of `<think>` and `</think>`: a thought is only at the beginning of the text, and the
rendered prompt may have opened it. The front end searches stop strings in the rest only.
"""

from enum import Enum
from typing import NamedTuple

from nv_api.said.tags import TagSearch

OPEN = "<think>"
CLOSE = "</think>"
_TURN = "<|im_start|>"
_CLOSES = TagSearch(CLOSE)


class Place(Enum):
    """Where a text stands."""

    BEFORE = "before"
    """A thought may begin here."""
    OPENED = "opened"
    """Right after the tag that opens a thought, which is in the prompt."""
    INSIDE = "inside"
    """In a thought."""
    AFTER = "after"
    """A thought can no longer begin."""


def place_after(prompt: str) -> Place:
    """Where the text after a rendered prompt begins.

    In ChatML only the last turn counts, so tags that a user wrote do not matter. In other formats
    only a tag at the very end counts.
    """
    *_, turn = prompt.rpartition(_TURN)
    if len(turn) == len(prompt):
        return Place.OPENED if prompt.rstrip().endswith(OPEN) else Place.BEFORE
    _, _, answer = turn.partition("\n")
    opened, closed = answer.rfind(OPEN), answer.rfind(CLOSE)
    if opened > closed:
        return Place.INSIDE if answer[opened + len(OPEN) :].strip() else Place.OPENED
    return Place.AFTER if answer.strip() else Place.BEFORE


class Parted(NamedTuple):
    """A piece of text in two parts, in the order of the text."""

    thought: str
    """The part that belongs to a thought, with its tags and the white space before it."""
    rest: str


class ThoughtScope:
    """Parts a text into its thought and the rest, piece by piece.

    The parts of all pieces, joined, are the text. Only white space and a beginning of `<think>` at
    the beginning of the text are held back.
    """

    def __init__(self, place: Place) -> None:
        self._place: Place = Place.INSIDE if place is Place.OPENED else place
        self._space = ""
        """White space before a tag that may come."""
        self._begun = ""
        """A beginning of the opening tag."""
        self._tail = ""
        """The thought's end, which may be a beginning of the closing tag; it was returned."""

    @property
    def state(self) -> tuple[Place, str, str, str]:
        """Everything that later pushes depend on; an earlier state, set, undoes those since."""
        return self._place, self._space, self._begun, self._tail

    @state.setter
    def state(self, state: tuple[Place, str, str, str]) -> None:
        self._place, self._space, self._begun, self._tail = state

    @property
    def is_over(self) -> bool:
        """Whether a thought can no longer begin or go on."""
        return self._place is Place.AFTER

    @property
    def is_inside(self) -> bool:
        """Whether the text pushed so far ends inside a thought."""
        return self._place is Place.INSIDE

    def push(self, piece: str) -> Parted:
        """Part the next piece."""
        if self._place is Place.AFTER:  # nearly always
            return Parted("", piece)
        if self._place is Place.INSIDE:
            return self._inside(piece, "")
        begun = self._begun + piece
        if not self._begun:
            begun = piece.lstrip()
            self._space += piece[: len(piece) - len(begun)]
        if OPEN.startswith(begun) and begun != OPEN:
            self._begun = begun
            return Parted("", "")
        space, self._space, self._begun = self._space, "", ""
        if not begun.startswith(OPEN):
            self._place = Place.AFTER
            return Parted("", space + begun)
        self._place = Place.INSIDE
        return self._inside(begun.removeprefix(OPEN), space + OPEN)

    def finish(self) -> Parted:
        """The text held back, at the end of the text: it is not a thought."""
        held, self._space, self._begun = self._space + self._begun, "", ""
        return Parted("", held)

    def _inside(self, piece: str, before: str) -> Parted:
        """Part a piece inside a thought; `before` comes before it."""
        _, tag, after = _CLOSES.cut(self._tail + piece)
        if not tag:
            self._tail = after
            return Parted(before + piece, "")
        self._place = Place.AFTER
        return Parted(before + piece[: len(piece) - len(after)], after)
