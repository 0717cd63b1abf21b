"""ThoughtTokens: how many tokens of a completion are its thought.

Owns the count, which depends on the tokens alone: not on how they come, nor on what of their text
is held back. Never changes an answer.
"""

from collections.abc import Callable, Sequence

from nv_api.said import Place, ThoughtScope


class ThoughtTokens:
    """Counts the tokens up to the end of a thought, with its tags.

    Args:
        place: where the completion begins.
        token_text: returns a token's own text.
    """

    def __init__(self, place: Place, token_text: Callable[[int], str]) -> None:
        self._scope = ThoughtScope(place)
        self._token_text = token_text
        self._num_read = 0
        self.num_tokens = 0
        """Of the thought, so far."""

    def push(self, token_ids: Sequence[int]) -> None:
        """Read the next tokens."""
        scope = self._scope
        for token_id in token_ids:
            if scope.is_over:
                return
            parted = scope.push(self._token_text(token_id))
            self._num_read += 1
            if scope.is_inside or parted.thought:
                self.num_tokens = self._num_read
