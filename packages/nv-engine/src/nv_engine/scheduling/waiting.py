"""WaitingQueue: the sequences that wait for a slot, in the order of admission.

Owns that order, the sequences held until a sibling has computed their common prompt, and those set
aside until their adapter is loaded. Never admits one.
"""

from heapq import heapify, heappop, heappush
from typing import TypeAlias

from nv_engine.adapter import Adapter
from nv_engine.scheduling.policy import Policy
from nv_engine.scheduling.sequence import Sequence

Entry: TypeAlias = tuple[bool, tuple[int, ...], int, Sequence]
"""New or preempted, the policy's key, the number of arrival, the sequence."""


class WaitingQueue:
    """A heap by policy; those that were preempted come first.

    An entry of one that has ended stays until it is on top, or such entries are more than half.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[Entry] = []
        self._counted: dict[Sequence, int] = {}  # tokens of those in the heap that have not ended
        self._held: dict[int, list[Sequence]] = {}  # by request
        self._parked: dict[int, list[Entry]] = {}  # by the adapter's key: heaps
        self.num_tokens = 0
        """Of those in the queue: what they have to compute, but for what is cached."""

    def __len__(self) -> int:
        """Count the sequences that still want to run."""
        return len(self._counted) + sum(map(len, self._held.values()))

    def hold(self, sequence: Sequence) -> None:
        """Keep a sequence out of the queue until `release`, or until a sibling has ended."""
        self._held.setdefault(sequence.request_id, []).append(sequence)

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence for a slot."""
        is_new = sequence.num_cached_tokens < 0
        entry = (is_new, self._policy(sequence), sequence.number, sequence)
        self._counted[sequence] = num_tokens = len(sequence.token_ids)
        self.num_tokens += num_tokens
        heappush(self._heap, entry)

    def release(self, request_id: int) -> None:
        """Put those held of a request into the queue."""
        for sequence in self._held.pop(request_id, ()):
            self.push(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Note that a sequence has ended, wherever it was: the others no longer wait for it."""
        held = self._held.get(sequence.request_id, [])
        if sequence in held:
            held.remove(sequence)
            return
        self._forget(sequence)
        self.release(sequence.request_id)

    def first(self) -> Sequence | None:
        """The next to admit, which stays in the queue; None if the queue is empty."""
        while self._heap and self._heap[0][-1].finish_reason is not None:
            self.pop()
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> None:
        """Take out the sequence that `first` named."""
        self._forget(heappop(self._heap)[-1])

    def park(self) -> bool:
        """Put the sequence that `first` named aside until its adapter is loaded.

        Returns:
            Whether it is the first of its adapter.
        """
        entry = heappop(self._heap)
        adapter = entry[-1].adapter
        assert adapter is not None, "only adapters are waited for"
        parked = self._parked.setdefault(adapter.key, [])
        heappush(parked, entry)
        return len(parked) == 1

    def is_before(self, key: int) -> bool:
        """Whether the sequence that `first` named comes before those that wait for an adapter."""
        parked = self._parked.get(key)
        return not parked or self._heap[0] < parked[0]

    def unpark(self, key: int) -> None:
        """Put the sequences of an adapter back into the queue, in their old places."""
        for entry in self._parked.pop(key, ()):
            heappush(self._heap, entry)

    def parked(self) -> list[Adapter]:
        """The adapters that are waited for, that of the first sequence to admit first."""
        heads = []
        for key, heap in list(self._parked.items()):
            while heap and heap[0][-1].finish_reason is not None:
                heappop(heap)
            if heap:
                heads.append(heap[0])
            else:
                del self._parked[key]
        adapters = [entry[-1].adapter for entry in sorted(heads)]
        return [adapter for adapter in adapters if adapter is not None]

    def parked_sequences(self, key: int) -> list[Sequence]:
        """Those that wait for an adapter."""
        return [entry[-1] for entry in self._parked.get(key, ())]

    @property
    def has_parked(self) -> bool:
        """Whether some sequence waits for its adapter."""
        return bool(self._parked)

    def _forget(self, sequence: Sequence) -> None:
        """Take a sequence off the count, if it is in it."""
        self.num_tokens -= self._counted.pop(sequence, 0)
        if len(self._heap) > 2 * len(self._counted):
            kept = [entry for entry in self._heap if entry[-1] in self._counted]
            heapify(kept)
            self._heap = kept

    def clear(self) -> None:
        """Forget all sequences."""
        self._heap.clear()
        self._counted.clear()
        self._held.clear()
        self._parked.clear()
        self.num_tokens = 0
