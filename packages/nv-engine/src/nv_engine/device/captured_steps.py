"""CapturedSteps: the steps of a runner that are padded and replayed from graphs.

Owns which layouts those are, and how often one comes before it is captured. Never captures, and
never computes.
"""

from collections.abc import Hashable
from typing import NamedTuple

from nv_engine.batch import Batch
from nv_engine.device import inputs
from nv_engine.device.buckets import Buckets
from nv_engine.device.graphs import Graphs, Step
from nv_engine.device.head import Outputs
from nv_engine.device.inputs import Layout

MAX_SEEN = 4096
"""Layouts that came and are remembered, in case they come again."""


class StepKey(NamedTuple):
    """All that a step depends on besides the values that it reads."""

    layout: Layout
    head: Hashable
    """The key of the head's work."""


class CapturedSteps:
    """Graphs by the padded layout of their step and what its head does."""

    def __init__(self, graphs: Graphs, buckets: Buckets) -> None:
        self._graphs = graphs
        self._buckets = buckets
        self._seen: dict[StepKey, int] = {}

    def __contains__(self, key: StepKey) -> bool:
        return key in self._graphs

    def find(self, exact: Layout, head: Hashable) -> StepKey | None:
        """The padded step if it is captured or due to be; None: run the exact one eagerly."""
        layout = self._buckets.layout(exact)
        key = StepKey(layout, head)
        count = self._seen.get(key, 0)
        if key not in self._graphs and count < self._buckets.least_count(layout):
            if len(self._seen) >= MAX_SEEN:
                self._seen.clear()
            self._seen[key] = count + 1
            return None
        self._seen.pop(key, None)
        return key if self._graphs.can_replay(key) else None

    def replay(self, key: StepKey, batch: Batch, step: Step, *, padding: int) -> Outputs | None:
        """Run a batch from a graph, captured first if its key is new.

        Args:
            key: what `find` returned for the batch.
            batch: whose chunks the steps compute.
            step: the padded step.
            padding: the slot of padding rows.

        Returns:
            What `step` returns, [num_steps, ...] each; None if it cannot be captured, and nothing
            but the run before the capture has run.
        """
        values = inputs.pack(batch.chunks, key.layout, padding)
        idle = inputs.pack((), key.layout, padding)
        return self._graphs.replay(key, values, step, idle, batch.num_steps)

    def drop(self) -> None:
        """Forget every graph: a tensor that they read has moved."""
        self._graphs.drop()
