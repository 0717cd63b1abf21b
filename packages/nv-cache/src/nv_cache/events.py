"""Events for external routers: which blocks can be found from now on, and which no longer.

Owns the pending events. Never influences the cache. A router computes the digests of a prompt's
blocks with its own `HashChain` (same block size and salt) and sends the request to the cache that
stores most of them.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A full block's prefix can be found from now on."""

    digest: bytes
    """16 bytes."""
    parent: bytes
    """Digest of the prefix before the block; the chain's root for the first block."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The last copy of a full block's prefix was removed."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """No block that was stored before this event can be found."""


Event = BlockStored | BlockRemoved | CacheCleared


class EventLog:
    """The events since the last `drain`, the newest `capacity` of them."""

    def __init__(self, capacity: int = 65536) -> None:
        """Keep at most `capacity` events (ValueError if < 1)."""
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}: it must be at least 1")
        self._events: deque[Event] = deque(maxlen=capacity)
        self.num_dropped = 0
        """Events that were dropped before a `drain`; a router that sees it grow must start over."""

    def add(self, event: Event) -> None:
        """Record `event`; a full log drops its oldest one."""
        self.num_dropped += len(self._events) == self._events.maxlen
        self._events.append(event)

    def drain(self) -> list[Event]:
        """Return the events in order and forget them."""
        events = list(self._events)
        self._events.clear()
        return events
