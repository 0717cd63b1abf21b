"""Requests: the sequences that have not ended, by request and index.

Owns which sequences are unfinished and which belong together. Never decides when one runs.
"""

from nv_engine.scheduling.sequence import Sequence


class Requests:
    """Unfinished requests, in order of arrival."""

    def __init__(self) -> None:
        self._by_id: dict[int, dict[int, Sequence]] = {}

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._by_id

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def add(self, sequence: Sequence) -> None:
        """Note a new sequence."""
        self._by_id.setdefault(sequence.request_id, {})[sequence.index] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget one that has ended, and its request with the last."""
        siblings = self._by_id[sequence.request_id]
        if len(siblings) > 1:  # one statement each: an exception between two would leave no sibling
            del siblings[sequence.index]
        else:
            del self._by_id[sequence.request_id]

    def of(self, request_id: int, index: int | None = None) -> list[Sequence]:
        """A request's sequences, or the one with that index; none of what has ended."""
        siblings = self._by_id.get(request_id, {})
        if index is not None:
            return [siblings[index]] if index in siblings else []
        return list(siblings.values())

    def all(self) -> list[Sequence]:
        """All of them."""
        return [sequence for siblings in self._by_id.values() for sequence in siblings.values()]

    def is_first(self, sequence: Sequence) -> bool:
        """True for the one that computes the prompt for its siblings."""
        return next(iter(self._by_id[sequence.request_id].values())) is sequence

    def prompt_holder(self, sequence: Sequence, committed: int) -> Sequence | None:
        """A sibling whose blocks hold the prompt of a sequence that has not run yet.

        Args:
            sequence: one that is about to be placed.
            committed: the newest step that is settled.

        Returns:
            None if there is none, or the prompt is a single token.
        """
        if sequence.num_cached_tokens >= 0 or sequence.prompt_len == 1:
            return None
        for sibling in self._by_id[sequence.request_id].values():
            if sibling.decoding and sibling.prompt_step <= committed:
                return sibling
        return None
