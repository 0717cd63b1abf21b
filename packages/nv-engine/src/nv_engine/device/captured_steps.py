"""CapturedSteps: which steps of a runner are padded and replayed from graphs.

Owns that choice: the layouts, and how often one comes before it is captured. Never captures, never
replays.

A capture takes the host as long as ten steps or more. So a step whose own layout is not captured
runs in a larger captured one, if it fits there, and its own is captured in the waits of the steps
that follow. All choices follow from the steps that came, none from the time: the same requests get
the same layouts, and so the same bits, whenever a capture ends.
"""

from collections.abc import Hashable
from typing import NamedTuple, cast

from nv_engine.device.buckets import Buckets
from nv_engine.device.graphs import Graphs
from nv_engine.device.inputs import Layout

MAX_SEEN = 4096
"""Layouts that came and are remembered, in case they come again."""
SHARED_COUNT = 8
"""Steps of a layout in a larger one before its own capture begins: fewer do not repay it."""
STEPS_OF_A_CAPTURE = 32
"""Steps after which a capture that was begun is used; what it lacks then is done at once."""


class StepKey(NamedTuple):
    """All that a step depends on besides the values that it reads."""

    layout: Layout
    head: Hashable
    """The key of the head's work."""
    adapters: Hashable = None
    """The part of the step that its adapters change."""


class Choice(NamedTuple):
    """How a step runs."""

    key: StepKey
    """The padded step, captured now if it is not yet."""
    coming: StepKey | None = None
    """Another one, whose capture begins after the step."""


class CapturedSteps:
    """The choice over a runner's graphs, which are kept by StepKey."""

    graphs: Graphs
    """Those that captured steps are kept in: the runner replays and drops them."""

    def __init__(self, graphs: Graphs, buckets: Buckets, *, shares: bool = False) -> None:
        """Choose nothing yet.

        Args:
            graphs: where captured steps are kept.
            buckets: their layouts.
            shares: whether steps run in larger captured ones until they have their own. Else each
                waits for its capture.
        """
        self.graphs = graphs
        self._buckets = buckets
        self._shares = shares
        self._seen: dict[StepKey, int] = {}
        self._coming: StepKey | None = None
        self._steps_left = 0

    def find(self, exact: Layout, head: Hashable, adapters: Hashable = None) -> Choice | None:
        """The padded step if it is captured or due to be; None: run the exact one eagerly."""
        self._count_step()
        own = StepKey(self._buckets.layout(exact), head, adapters)
        if own in self.graphs and own != self._coming:
            self._seen.pop(own, None)
            return Choice(own)
        shared = self._shared(own) if self._shares else None
        if shared is not None:
            return Choice(shared, self._due(own))
        if self._shares:
            own = own._replace(layout=self._buckets.coarse(own.layout))
        if self._count(own) <= self._least_count(own.layout):
            return None
        self._seen.pop(own, None)
        return Choice(own) if self.graphs.can_replay(own) else None

    def _count_step(self) -> None:
        """A capture that was begun is used from a certain step on, whenever it ends."""
        if self._coming is None:
            return
        self._steps_left -= 1
        if self._steps_left <= 0:
            self.graphs.finish()
            self._coming = None

    def _shared(self, own: StepKey) -> StepKey | None:
        """The smallest captured step that has room for this one."""
        layout = own.layout
        limit = self._buckets.coarse(layout)
        found = [
            key
            for key in cast("list[StepKey]", self.graphs.keys)
            if key[1:] == own[1:]
            and key != self._coming
            and layout.fits(key.layout)
            and (layout.only_single_tokens or key.layout.num_tokens <= limit.num_tokens)
        ]
        return min(found, key=lambda key: (key.layout.num_tokens, key.layout), default=None)

    def _due(self, own: StepKey) -> StepKey | None:
        """Count a step that runs in a larger one; its own key if its capture is to begin."""
        if self._count(own) < SHARED_COUNT or self._coming or not self.graphs.can_replay(own):
            return None
        self._coming, self._steps_left = own, STEPS_OF_A_CAPTURE
        return own

    def _count(self, key: StepKey) -> int:
        """Count a step that has no graph of its own."""
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen[key] = count = self._seen.get(key, 0) + 1
        return count

    def _least_count(self, layout: Layout) -> int:
        """Steps of a layout that run eagerly; a shared one is captured at once, for the others."""
        least = self._buckets.least_count(layout)
        return 0 if self._shares and least == 1 else least
