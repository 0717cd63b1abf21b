"""Log-probabilities of a completion: kept as flat numbers, made into dicts when they are read.

Owns both forms. Thousands of objects that live as long as their request would make Python's cycle
collector visit every loaded object, which stops all requests for a tenth of a second.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nv_engine.batch import TokenLogprobs

from nv_api.outputs import Logprob

if TYPE_CHECKING:
    from nv_api.outputs import Candidates

TokenText = Callable[[int], str]
"""A token's own text."""


class LogprobColumns:
    """The engine's log-probabilities of each token, all of one width."""

    def __init__(self) -> None:
        self._token_ids = array("q")
        self._values = array("f")  # the engine's own precision
        self._ranks = array("q")
        self._width = 0  # tokens of an entry

    def __len__(self) -> int:
        """Tokens."""
        return len(self._ranks)

    def extend(self, entries: Sequence[TokenLogprobs]) -> None:
        """Add a step's tokens."""
        for token_ids, logprobs, rank in entries:
            self._width = len(token_ids)
            self._token_ids.extend(token_ids)
            self._values.extend(logprobs)
            self._ranks.append(rank)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first tokens."""
        width = self._width
        del self._ranks[num_tokens:]
        del self._token_ids[num_tokens * width :]
        del self._values[num_tokens * width :]

    def cumulative(self) -> float:
        """The sum over the drawn tokens."""
        return sum(self._values[:: self._width]) if self._ranks else 0.0

    def reader(self, token_text: TokenText | None, first: int = 0) -> "Callable[[], Candidates]":
        """Return a function that makes dicts of the tokens so far, from `first` on.

        It is called when the dicts are read, because it would take too long within a step.
        """
        width, num_tokens = self._width, len(self)

        def entry(index: int) -> TokenLogprobs:
            span = slice(index * width, (index + 1) * width)
            ids, values = self._token_ids[span].tolist(), self._values[span].tolist()
            return TokenLogprobs(ids, values, self._ranks[index])

        return lambda: [candidates(entry(index), token_text) for index in range(first, num_tokens)]


def candidates(entry: TokenLogprobs, token_text: TokenText | None) -> dict[int, Logprob]:
    """A position's tokens as users see them: its own first, then the most likely, best first.

    Equal probabilities have equal ranks.
    """
    found: dict[int, Logprob] = {}
    rank, previous = entry.rank, None
    for place, (token, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        if place > 0 and logprob != previous:
            rank, previous = place, logprob
        if token not in found:
            text = None if token_text is None else token_text(token)
            found[token] = Logprob(logprob, rank, text)
    return found
