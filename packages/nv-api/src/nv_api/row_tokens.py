"""RowTokens: hands the tokens that a step drew to their completions, row by row.

Owns which completion a row is. Never searches a text: of a completion whose text is searched as it
grows, or that has more than tokens, it makes an update for the processor.
"""

from collections.abc import Collection, Iterable, Sequence

from nv_engine import SequenceUpdate

from nv_api.completion import Completion
from nv_api.request import Request


class RowTokens:
    """The rows of one step, and of those after it that have the same rows.

    Args:
        rows: the request of each row, or None if it is not in flight any more, and the index of
            its completion.
    """

    def __init__(self, rows: Iterable[tuple[Request | None, int]]) -> None:
        self._plain: list[tuple[int, Completion]] = []
        """Completions that need nothing but their tokens, with their rows."""
        self._others: list[tuple[int, int, Completion]] = []
        """The others: row, id of the request, completion."""
        request_ids: dict[int, None] = {}
        for number, (request, index) in enumerate(rows):
            if request is None:
                continue
            request_ids[request.request_id] = None
            completion = request.completions[index]
            if completion.is_plain:
                self._plain.append((number, completion))
            else:
                self._others.append((number, request.request_id, completion))
        self.request_ids = tuple(request_ids)
        """Of the rows, each once."""

    def take(
        self, token_ids: Sequence[Sequence[int]], updated: Collection[Completion | None]
    ) -> list[SequenceUpdate]:
        """Hand each completion its tokens.

        Args:
            token_ids: by step and row.
            updated: completions that have an update of this step: their tokens are there.

        Returns:
            Updates of the completions that need more than tokens.
        """
        for drawn in token_ids:
            for number, completion in self._plain:
                if completion.finish_reason is None and not (updated and completion in updated):
                    completion.token_ids.append(drawn[number])
        return [
            _update(request_id, completion.index, tuple(drawn[number] for drawn in token_ids))
            for number, request_id, completion in self._others
            if completion.finish_reason is None and completion not in updated
        ]


def _update(request_id: int, index: int, token_ids: tuple[int, ...]) -> SequenceUpdate:
    """Tokens that are neither the first nor the last of their completion."""
    return SequenceUpdate(request_id, index, token_ids, None, None, 0, None)
