"""Admission: how many sequences may wait for the engine.

Owns the count of sequences in flight. Never waits: what does not fit is refused at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nv_api.server.errors import invalid, too_many


class AdmissionControl:
    """Counts sequences (completions of prompts), from their arrival to their end.

    Args:
        max_queue: sequences that may wait.
        num_slots: sequences that the engine runs at once, known once it is loaded. The
            engine's own counts would be some steps old.
    """

    def __init__(self, max_queue: int, num_slots: Callable[[], int]) -> None:
        self._max_queue = max_queue
        self._num_slots = num_slots
        self.num_in_flight = 0

    @property
    def num_waiting(self) -> int:
        """Sequences in flight beyond the engine's slots."""
        return max(0, self.num_in_flight - self._num_slots())

    @contextmanager
    def admit(self, num_sequences: int) -> Iterator[None]:
        """Take sequences in, until the block ends.

        Raises:
            ApiError: 429, the queue has not enough room now; 400, it never has.
        """
        if num_sequences > self._max_queue:
            raise invalid(
                f"the request has {num_sequences} sequences (prompts times n): at most "
                f"{self._max_queue} may wait, so send fewer"
            )
        if self.num_in_flight + num_sequences > self._num_slots() + self._max_queue:
            raise too_many(
                f"{self.num_waiting} sequences wait for the engine: at most {self._max_queue} may, "
                "so try again later"
            )
        self.num_in_flight += num_sequences
        try:
            yield
        finally:
            self.num_in_flight -= num_sequences
