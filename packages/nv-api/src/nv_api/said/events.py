"""Events: what parsers report about a completion's text, in the order of the text.

Owns the records. They hold new text only: joined, the texts of a kind are the whole.
"""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer; not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning; not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a function: `index` counts the calls of a completion from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of a call's arguments, as JSON text; not empty."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The end of a call. If it is whole, its joined arguments are a JSON object."""

    index: int
    is_whole: bool


Event: TypeAlias = Content | Thought | CallBegun | Arguments | CallEnded


def joined(events: list[Event]) -> list[Event]:
    """The same events, where neighbours of one kind (and call) are one event."""
    if len(events) < 2:
        return events
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        elif isinstance(event, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            found[-1] = Arguments(event.index, last.text + event.text)
        else:
            found.append(event)
    return found
