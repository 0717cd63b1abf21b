"""Detokenizers: token ids in, text out, a few tokens at a time.

Owns the bytes that are not a character yet. Never looks for stop strings. The pieces joined, with
`flush` at the end, are the text that the tokenizer decodes from all ids at once, and no piece has a
part of a character.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
CONTEXT = 4
"""Tokens of the prompt that are decoded in front of the first piece."""
PATIENCE = 8
"""Pushes after which bytes that are still not a character become replacement characters."""


class Detokenizer(Protocol):
    """Text of one completion, as its tokens arrive.

    Attributes:
        state: everything that later pushes depend on. Setting an earlier state undoes the pushes
            since.
    """

    state: Any

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens and return the text that they complete."""

    def flush(self) -> str:
        """Return the text of incomplete bytes: replacement characters, or ""."""


class ByteDetokenizer:
    """For byte-level tokenizers, where a token *is* some bytes: UTF-8, decoded incrementally.

    Args:
        pieces: the bytes of a token id; b"" if the text omits it.
    """

    def __init__(self, pieces: Callable[[int], bytes]) -> None:
        self._pieces = pieces
        self.state = b""
        """The bytes that are not a character yet."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens and return the characters that they complete."""
        known = self.state + b"".join(map(self._pieces, token_ids))
        text, num_decoded = utf_8_decode(known, "replace", False)
        self.state = known[num_decoded:]
        return text

    def flush(self) -> str:
        """Return the replacement character of an incomplete last character, or ""."""
        known, self.state = self.state, b""
        return known.decode("utf-8", "replace")


class WindowDetokenizer:
    """For any tokenizer: decode new tokens after some context, and return the text after it.

    The tokens to the left of a token matter (leading spaces, joined words); those between the last
    two places where the text was complete are enough (the two offsets are vLLM's and TGI's
    method). Replacement characters at the end of a text may become other characters: they are held
    back, for at most `PATIENCE` pushes.

    Args:
        decode: text of token ids, all of them kept.
        is_shown: False for the ids that the text omits.
        prompt_token_ids: the tokens before; they decide whether the first word begins with a space.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_shown: Callable[[int], bool],
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._is_shown = is_shown
        self._window = [token for token in prompt_token_ids[-CONTEXT:] if is_shown(token)]
        while REPLACEMENT in decode(self._window):  # it begins within a character
            del self._window[0]
        self._num_context = len(self._window)  # tokens of the window whose text was complete
        self._num_shown = len(decode(self._window))
        self._num_waits = 0

    @property
    def state(self) -> tuple[list[int], int, int, int]:
        """The window, its number of context tokens, its characters shown, and pushes waited."""
        return self._window, self._num_context, self._num_shown, self._num_waits

    @state.setter
    def state(self, state: tuple[list[int], int, int, int]) -> None:
        self._window, self._num_context, self._num_shown, self._num_waits = state

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens and return the characters that they complete."""
        shown = [token for token in token_ids if self._is_shown(token)]
        if not shown:
            return ""
        self._window = self._window + shown  # not in place: an earlier state keeps the old list
        text = self._decode(self._window)
        whole = text.rstrip(REPLACEMENT)
        self._num_waits += 1
        if len(whole) == len(text) or self._num_waits >= PATIENCE:
            piece = text[self._num_shown :]
            self._move_on()
            return piece
        piece = whole[self._num_shown :]
        self._num_shown += len(piece)
        return piece

    def flush(self) -> str:
        """Return the text held back."""
        return self._decode(self._window)[self._num_shown :] if self._num_waits else ""

    def _move_on(self) -> None:
        """The new tokens become the context."""
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._num_shown = len(self._decode(self._window))
        self._num_waits = 0
