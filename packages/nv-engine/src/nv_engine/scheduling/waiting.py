"""WaitingQueue: the sequences that wait for a slot, in the order of admission.

Owns that order, and those held until a sibling has computed their common prompt. Never admits
anybody.
"""

from heapq import heappop, heappush

from nv_engine.scheduling.policy import Policy
from nv_engine.scheduling.sequence import Sequence


class WaitingQueue:
    """A heap by policy; those that were preempted come first. Finished ones are dropped lazily."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[bool, tuple[int, ...], int, Sequence]] = []
        self._held: dict[int, list[Sequence]] = {}  # by request
        self.num_tokens = 0
        """Of those in the queue: what they have to compute, but for what is cached."""

    def __len__(self) -> int:
        """Count the sequences that still want to run, in time proportional to the queue."""
        waiting = [entry[-1] for entry in self._heap]
        waiting += [sequence for held in self._held.values() for sequence in held]
        return sum(sequence.finish_reason is None for sequence in waiting)

    def add(self, sequence: Sequence, *, has_leader: bool) -> None:
        """Let a sequence wait for a slot; one that never ran, for its sibling's prompt before."""
        if has_leader and sequence.num_cached_tokens < 0:
            self._held.setdefault(sequence.request_id, []).append(sequence)
        else:
            self.push(sequence)

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait for a slot."""
        is_new = sequence.num_cached_tokens < 0
        self.num_tokens += len(sequence.token_ids)
        heappush(self._heap, (is_new, self._policy(sequence), sequence.number, sequence))

    def release(self, request_id: int) -> None:
        """Put those held of a request into the queue."""
        for sequence in self._held.pop(request_id, ()):
            self.push(sequence)

    def first(self) -> Sequence | None:
        """The next to admit, which stays in the queue; None if nobody waits."""
        heap = self._heap
        while heap and heap[0][-1].finish_reason is not None:
            self.pop()
        return heap[0][-1] if heap else None

    def pop(self) -> None:
        """Take out the sequence that `first` named."""
        self.num_tokens -= len(heappop(self._heap)[-1].token_ids)

    def clear(self) -> None:
        """Forget everybody."""
        self._heap.clear()
        self._held.clear()
        self.num_tokens = 0
