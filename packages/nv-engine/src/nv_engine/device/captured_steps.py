"""CapturedSteps: which steps of a runner are padded and replayed from graphs.

Owns that choice: the layouts, and how often one comes before it is captured. Never captures, never
replays.
"""

from collections.abc import Hashable
from typing import NamedTuple

from nv_engine.device.buckets import Buckets
from nv_engine.device.graphs import Graphs
from nv_engine.device.inputs import Layout

MAX_SEEN = 4096
"""Layouts that came and are remembered, in case they come again."""


class StepKey(NamedTuple):
    """All that a step depends on besides the values that it reads."""

    layout: Layout
    head: Hashable
    """The key of the head's work."""
    adapters: Hashable = None
    """The part of the step that its adapters change."""


class CapturedSteps:
    """The choice over a runner's graphs, which are kept by StepKey."""

    graphs: Graphs
    """Those that captured steps are kept in: the runner replays and drops them."""

    def __init__(self, graphs: Graphs, buckets: Buckets) -> None:
        self.graphs = graphs
        self._buckets = buckets
        self._seen: dict[StepKey, int] = {}

    def find(self, exact: Layout, head: Hashable, adapters: Hashable = None) -> StepKey | None:
        """The padded step if it is captured or due to be; None: run the exact one eagerly."""
        layout = self._buckets.layout(exact)
        key = StepKey(layout, head, adapters)
        count = self._seen.get(key, 0)
        if key not in self.graphs and count < self._buckets.least_count(layout):
            if len(self._seen) >= MAX_SEEN:
                self._seen.clear()
            self._seen[key] = count + 1
            return None
        self._seen.pop(key, None)
        return key if self.graphs.can_replay(key) else None
