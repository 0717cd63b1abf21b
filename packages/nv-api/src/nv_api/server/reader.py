"""Reader: what a completion's text says: for now, content.

Owns the protocol that every answer of a chat passes through, and the reader that finds content
alone. Parsers of thoughts and tool calls are other readers of the same protocol.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from nv_api.prompts import TokenPrompt


class Said(NamedTuple):
    """What is new in what a completion says."""

    content: str = ""


class Reader(Protocol):
    """Reads one completion, in pieces of any size; what it returns does not depend on the sizes."""

    def push(self, text: str) -> Said:
        """Read the text that follows; what may belong to a mark is held back."""

    def end(self) -> Said:
        """The text is complete: return what was held back."""


MakeReader = Callable[[TokenPrompt], Reader]
"""Makes a reader for one completion of a rendered prompt."""


class ContentReader:
    """All text is content."""

    def push(self, text: str) -> Said:
        """As it is."""
        return Said(text)

    def end(self) -> Said:
        """Nothing is held back."""
        return Said()


def content_reader(prompt: TokenPrompt) -> Reader:
    """A `MakeReader`."""
    return ContentReader()
