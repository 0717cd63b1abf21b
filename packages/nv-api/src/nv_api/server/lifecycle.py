"""Lifecycle: whether a server takes requests: loading, ready, draining, lost.

Owns the reasons for a 503, and the requests that run. Never ends the process.
"""

import asyncio
import time
from typing import TYPE_CHECKING

from nv_api.server.errors import ApiError, lost, unavailable

if TYPE_CHECKING:
    from nv_api.server.guard import Guard
    from nv_api.server.llm import ServedLLM

POLL_SECONDS = 0.05


class Lifecycle:
    """Where a server is between its start and its end.

    Args:
        llm: the model.
        stall_seconds: longest time without a step while work waits.
    """

    def __init__(self, llm: "ServedLLM", stall_seconds: float) -> None:
        self._llm = llm
        self._stall_seconds = stall_seconds
        self._num_steps = -1
        self._moved_at = time.monotonic()
        self.is_draining = False
        self.guards: set[Guard] = set()
        """Of the requests that run."""

    def problem(self) -> ApiError | None:
        """The reason why no request can run; None: requests run."""
        if self._llm.loss is not None:
            return lost(self._llm.loss)
        if not self._llm.is_ready:
            return unavailable("the model is loading: try again later", "loading")
        return None

    def check_open(self) -> None:
        """Raise the reason why a new request cannot run."""
        if (problem := self.drain_problem() or self.problem()) is not None:
            raise problem

    def drain_problem(self) -> ApiError | None:
        """The reason why new requests are refused though others still run."""
        if self.is_draining:
            return unavailable("the server is shutting down: send this to another", "draining")
        return None

    def stall_problem(self) -> ApiError | None:
        """An error if the engine has work and has not stepped for too long."""
        stalled = time.monotonic() - self._moved_at
        if stalled >= self._stall_seconds:
            return unavailable(
                f"the engine has work and has not made a step for {stalled:.0f} s", "engine_stalled"
            )
        return None

    def note_progress(self) -> None:
        """Compare the engine's counters with the last ones; called a few times per second."""
        stats = self._llm.stats
        if stats.num_steps != self._num_steps or not self.guards or not self._llm.is_ready:
            self._num_steps = stats.num_steps
            self._moved_at = time.monotonic()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, wait for those that run, and interrupt what is left after that."""
        self.is_draining = True
        if not await self._ended(seconds):
            for guard in [*self.guards]:
                guard.interrupt(unavailable("the server has shut down", "draining"))
            await self._ended(1.0)  # their last events go out

    async def _ended(self, seconds: float) -> bool:
        """Wait until nothing runs; False: not within so many seconds."""
        deadline = time.monotonic() + seconds
        while self.guards and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        return not self.guards
