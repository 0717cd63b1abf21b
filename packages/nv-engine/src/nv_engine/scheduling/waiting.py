"""WaitingQueue: the sequences that wait for a slot, in the order of admission.

Owns that order. Never admits anybody.
"""

from heapq import heappop, heappush

from nv_engine.scheduling.policy import Policy
from nv_engine.scheduling.sequence import Sequence


class WaitingQueue:
    """A heap by policy; those that were preempted come first. Finished ones are dropped lazily."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[bool, tuple[int, ...], int, Sequence]] = []

    def __len__(self) -> int:
        """Count the sequences that still want to run, in time proportional to the queue."""
        return sum(entry[-1].finish_reason is None for entry in self._heap)

    def push(self, sequence: Sequence, *, preempted: bool) -> None:
        """Let a sequence wait."""
        entry = (not preempted, self._policy(sequence), sequence.number, sequence)
        heappush(self._heap, entry)

    def first(self) -> Sequence | None:
        """The next to admit, which stays in the queue; None if nobody waits."""
        heap = self._heap
        while heap and heap[0][-1].finish_reason is not None:
            heappop(heap)
        return heap[0][-1] if heap else None

    def pop(self) -> None:
        """Take out the sequence that `first` named."""
        heappop(self._heap)

    def clear(self) -> None:
        """Forget everybody."""
        self._heap.clear()
