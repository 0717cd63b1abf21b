"""AdapterSlots: which adapters the device holds, and which it reads next.

Owns the slots of the device's pool, the images on its host, who of the running sequences uses
which, and how many may pass the one that waits longest. Never decides which sequence runs.

A version's way is: the library reads its files; a rank fetches its slices into an image; an image
is loaded into a slot that no running sequence uses. Only the last is in the device's own order, and
it is one copy. Its step is that of the other sequences alone, so that the copy and the new
sequence's prompt do not make one long step together. If nothing runs, all comes at once, and the
device waits.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from nv_engine.adapter import Adapter
from nv_engine.batch import AdapterFetch, AdapterLoad
from nv_engine.scheduling.sequence import Sequence

MAX_PASSED = 64
"""Later requests with adapters that may be admitted before one whose adapter has no slot."""


class AdapterSlots:
    """Slots 0 .. num_slots - 1, and images 0 .. num_images - 1.

    Args:
        num_slots: of the pool.
        num_images: on the host, at least num_slots.
    """

    def __init__(self, num_slots: int, num_images: int) -> None:
        self.num_slots, self.num_images = num_slots, num_images
        self._slots: dict[int, int] = {}  # by key, the least recently used first
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._images: dict[int, int] = {}  # by key, likewise
        self._free_images = list(range(num_images - 1, -1, -1))
        self._fetched: set[int] = set()  # keys of images that are whole
        self._users: Counter[int] = Counter()
        self._adapters: dict[int, Adapter] = {}  # of images, by key
        self._fetches: list[AdapterFetch] = []  # for the next batch
        self._loads: list[AdapterLoad] = []  # likewise
        self._arriving: set[int] = (
            set()
        )  # keys that the next batch loads, and its step does not use
        self._arrived: set[int] = set()  # keys that came since `arrivals` was called
        self.blocked: int | None = None
        """The key that waits longest for a slot alone, if one does."""
        self.num_passed = 0
        """Admissions with adapters that passed the sequence that waits for it."""

    def anew(self) -> "AdapterSlots":
        """The same with nothing in it: the device is in an unknown state."""
        return AdapterSlots(self.num_slots, self.num_images)

    def slot_of(self, sequence: Sequence) -> int:
        """The slot of a sequence's adapter, -1 if it has none; it must be in one."""
        return -1 if sequence.adapter is None else self._slots[sequence.adapter.key]

    def has(self, adapter: Adapter) -> bool:
        """Whether an adapter has a slot; it may not be there yet."""
        return adapter.key in self._slots

    def is_there(self, adapter: Adapter) -> bool:
        """Whether the next batch's step may use an adapter."""
        return self.has(adapter) and adapter.key not in self._arriving

    def arrivals(self, *, waits: bool) -> set[int]:
        """Keys of adapters that the next batch's step may use, and could not before; each once.

        Args:
            waits: its step waits for what the same batch loads.
        """
        if waits:
            self._land()
        found, self._arrived = self._arrived, set()
        return found

    def _land(self) -> None:
        """Let the next batch's step use what was loaded."""
        self._arrived |= self._arriving
        self._arriving.clear()

    @property
    def may_pass(self) -> bool:
        """Whether a sequence with an adapter may still pass one that waits for a slot."""
        return self.num_passed < MAX_PASSED

    def take(self, sequence: Sequence) -> None:
        """Note that a sequence runs."""
        if sequence.adapter is not None:
            key = sequence.adapter.key
            self._users[key] += 1
            self._slots[key] = self._slots.pop(key)

    def release(self, sequence: Sequence) -> None:
        """Note that a sequence runs no longer."""
        if sequence.adapter is not None:
            self._users[sequence.adapter.key] -= 1

    def note(self, fetched: Iterable[int], failed: Mapping[int, str]) -> None:
        """Note images that are whole, and why some could not be made."""
        self._fetched.update(self._images.keys() & fetched)
        for key, why in failed.items():
            if key in self._adapters:
                self._adapters[key].failure = why
            if (image := self._images.pop(key, None)) is not None:
                self._free_images.append(image)
            self._fetched.discard(key)
            if not self._users[key] and (slot := self._slots.pop(key, None)) is not None:
                self._free_slots.append(slot)

    def fetch(self, adapter: Adapter, wanted: Iterable[int]) -> None:
        """Have an adapter fetched, if it is not and an image has room for it.

        Args:
            adapter: whose files are read.
            wanted: keys whose images must stay.
        """
        if adapter.key in self._images:
            return
        if not self._free_images:
            kept = {*wanted, *(load.key for load in self._loads)}
            oldest = next((key for key in self._images if key not in kept), None)
            if oldest is None:
                return
            self._fetched.discard(oldest)  # if it is not whole yet: a rank fetches in order
            del self._adapters[oldest]
            self._free_images.append(self._images.pop(oldest))
        image = self._images[adapter.key] = self._free_images.pop()
        self._adapters[adapter.key] = adapter
        self._fetches.append(AdapterFetch(image, adapter.source))

    def is_whole(self, key: int) -> bool:
        """Whether an adapter's image can be loaded at once."""
        return key in self._fetched

    @property
    def has_load(self) -> bool:
        """Whether the next batch loads an adapter."""
        return bool(self._loads)

    def take_orders(self) -> tuple[tuple[AdapterFetch, ...], tuple[AdapterLoad, ...]]:
        """Take off what the next batch has to fetch and to load."""
        orders = tuple(self._fetches), tuple(self._loads)
        self._fetches, self._loads = [], []
        self._land()
        return orders

    def load(self, key: int, *, waits: bool, kept: int | None = None) -> bool:
        """Have an adapter's image loaded into a slot that no running sequence uses.

        Args:
            key: of the adapter, which has an image.
            waits: the device may wait until the image is whole and loaded; else the next batch's
                step does not use it.
            kept: of an adapter that an earlier sequence is about to use; None: none.

        Returns:
            False: the image is not whole yet, or every slot is in use.
        """
        if key not in self._images or not (waits or key in self._fetched):
            return False
        if not self._free_slots:
            used = {kept, *self._arriving}
            idle = (each for each in self._slots if not self._users[each] and each not in used)
            if (oldest := next(idle, None)) is None:
                return False
            self._free_slots.append(self._slots.pop(oldest))
        slot = self._slots[key] = self._free_slots.pop()
        self._images[key] = self._images.pop(key)
        if not waits:
            self._arriving.add(key)
        self._loads.append(AdapterLoad(slot, self._images[key], key))
        return True
