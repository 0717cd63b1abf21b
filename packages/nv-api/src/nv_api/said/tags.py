"""Tags: the search for fixed texts in a text that comes in pieces.

Owns the tail that is held back while it may become a tag, and the white space next to tags, which
belongs to them. Never knows what a tag means.
"""

import re
from typing import NamedTuple


class Cut(NamedTuple):
    """A text, cut at its first tag."""

    before: str
    tag: str
    """The tag; "" if none is complete."""
    after: str
    """The text after the tag; without a tag, an end that may become one."""


class TagSearch:
    """The search for the first of some tags; a tag may be the end of another one."""

    def __init__(self, *tags: str) -> None:
        longest_first = sorted(tags, key=len, reverse=True)
        self._tag = re.compile("|".join(map(re.escape, longest_first)))
        begun = {tag[:length] for tag in tags for length in range(1, len(tag))}
        ends = sorted(begun, key=len, reverse=True)
        self._begun = re.compile(rf"(?:{'|'.join(map(re.escape, ends))})\Z")
        self._longest = len(longest_first[0]) - 1
        self._firsts = tuple({tag[0] for tag in tags})

    def may_be_in(self, text: str) -> bool:
        """Whether a tag may begin in a text; nearly always False, and much faster than a cut."""
        return any(first in text for first in self._firsts)

    def cut(self, text: str) -> Cut:
        """Cut a text, which begins with the end that the last cut held back."""
        if not self.may_be_in(text):
            return Cut(text, "", "")
        found = self._tag.search(text)
        if found is not None:
            return Cut(text[: found.start()], found[0], text[found.end() :])
        begun = self._begun.search(text, max(0, len(text) - self._longest))
        if begun is not None:
            return Cut(text[: begun.start()], "", begun[0])
        return Cut(text, "", "")


class Passed(NamedTuple):
    """The result of one piece of a passage."""

    text: str
    """Text before the tag, without the space next to it."""
    space: str
    """The space between this text and the tag."""
    tag: str
    """The tag; "" if the passage continues."""
    rest: str
    """The text after the tag."""


class Passage:
    """Text up to a tag, without the white space next to tags.

    A piece costs O(its length + the longest tag), whatever is held back.

    Args:
        search: the tags, each of which begins with "<".
        space: the characters that belong to a tag when they are next to it.
        is_at_tag: whether the passage begins after a tag.
    """

    def __init__(self, search: TagSearch, space: str, *, is_at_tag: bool) -> None:
        self._search = search
        self._space = space
        self._is_at_tag = is_at_tag
        self._spaces: list[str] = []
        self._begun = ""

    def passes(self, piece: str) -> bool:
        """Whether a piece is text of the passage as it is, and changes nothing."""
        return not (
            self._is_at_tag
            or self._spaces
            or self._begun
            or "<" in piece
            or piece[-1:] in self._space
        )

    def push(self, piece: str) -> Passed:
        """Add a piece; after a tag was returned, the passage is over."""
        if self.passes(piece):
            return Passed(piece, "", "", "")
        text = self._begun + piece
        if self._is_at_tag:
            text = text.lstrip(self._space)
            self._is_at_tag = not text
        before, tag, self._begun = self._search.cut(text)
        passed = before.rstrip(self._space)
        space = before[len(passed) :]
        if passed:
            passed = self._release() + passed
        if space:
            self._spaces.append(space)
        if not tag:
            return Passed(passed, "", "", "")
        rest, self._begun = self._begun, ""
        return Passed(passed, self._release(), tag, rest)

    @property
    def num_held(self) -> int:
        """Letters of the text that is held back."""
        return sum(map(len, self._spaces)) + len(self._begun)

    def finish(self) -> str:
        """The text held back, at the end of the text."""
        held = self._release() + self._begun
        self._begun = ""
        return held

    def _release(self) -> str:
        space = "".join(self._spaces)
        self._spaces.clear()
        return space
