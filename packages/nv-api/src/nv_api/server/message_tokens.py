"""MessageTokens: which tokens of an answer are in the text of its messages.

Owns that question, which depends on the tokens alone: not on how they come, nor on what of their
text is held back. Tokens of calls are in no message, as are white space and tags around calls.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from nv_api.said import Content, Event, ToolCalls
from nv_api.server.protocol.fields import Json


class _Token(NamedTuple):
    """One token that was read, or the end of one."""

    text: str
    entry: Json | None
    """Its log-probabilities; None: they are in a message already, with the token's beginning."""


class MessageTokens:
    """The log-probabilities of the tokens of each message, in the order of the tokens.

    Args:
        num_thought_tokens: returns how many tokens of the answer are its thought, so far.
        calls: reads the text after the thought, token by token; None: it has no calls.
        shown_text: returns a token's own text, "" for a token that an answer leaves out.
    """

    def __init__(
        self,
        num_thought_tokens: Callable[[], int],
        calls: ToolCalls | None,
        shown_text: Callable[[int], str],
    ) -> None:
        self._num_thought_tokens = num_thought_tokens
        self._calls = calls
        self._shown_text = shown_text
        self._new: list[tuple[int, Json]] = []
        """Tokens, with their entries, that are not read yet: they may be of the thought."""
        self._num_read = 0
        self._held: list[_Token] = []
        """Tokens whose text is neither in a message nor in a call yet."""
        self._messages: list[list[Json]] = []
        """Entries that were not taken yet."""
        self._is_open = False
        """The last text that was found is of the last message."""

    def push(self, token_ids: Sequence[int], entries: Sequence[Json]) -> None:
        """Add tokens and their entries."""
        self._new += zip(token_ids, entries, strict=True)

    def take(self, number: int) -> list[Json]:
        """The entries of message `number` that were not taken yet."""
        self._read()
        if number >= len(self._messages):
            return []
        found, self._messages[number] = self._messages[number], []
        return found

    def finish(self) -> None:
        """The answer has ended."""
        self._read()
        if self._calls is not None:
            self._sort(self._calls, self._calls.finish())

    def _read(self) -> None:
        """Read the new tokens; it is known by now which of them are the thought."""
        new, self._new = self._new, []
        if not new:
            return
        num_hidden = max(0, self._num_thought_tokens() - self._num_read)
        self._num_read += len(new)
        if self._calls is None:
            self._messages = self._messages or [[]]
            self._messages[0] += [entry for _, entry in new[num_hidden:]]
            return
        for token_id, entry in new[num_hidden:]:
            self._read_token(self._calls, self._shown_text(token_id), entry)

    def _read_token(self, calls: ToolCalls, text: str, entry: Json) -> None:
        if not text and self._is_open and not self._held:
            self._messages[-1].append(entry)  # it belongs to the token before it
            return
        self._held.append(_Token(text, entry))
        if text:
            self._sort(calls, calls.push(text))

    def _sort(self, calls: ToolCalls, events: list[Event]) -> None:
        """Find the message of the tokens that are held, of which the last one caused the events."""
        for event in events:
            if isinstance(event, Content):
                self._add(event.text, calls.num_held)
            else:
                self._is_open = False
                self._held = self._held[-1:]  # its text may go on after the call
        if events and not self._is_open:
            self._held = []

    def _add(self, text: str, num_held: int) -> None:
        """Add a text to a message. In what is held, only the parser's own part follows it.

        Tokens before it are space or tags, which no event reports; those after it stay held.
        """
        if not self._is_open:
            self._is_open = True
            self._messages.append([])
        known = "".join(token.text for token in self._held)
        start = max(0, known.rfind(text, 0, len(known) - num_held))
        end, place, held = start + len(text), 0, self._held
        self._held = []
        for token in held:
            following = place + len(token.text)
            if start < following and place <= end and (place < end or not token.text):
                if token.entry is not None:
                    self._messages[-1].append(token.entry)
                if following > end:
                    self._held.append(_Token(token.text[end - place :], None))
            elif following > end:
                self._held.append(token)
            place = following
