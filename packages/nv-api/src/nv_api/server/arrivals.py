"""Arrivals: requests that have come, begun a few in each turn of the event loop.

A request takes about a thousandth of a second of the loop before the engine has it. If a thousand
come at once and all begin in one turn, whatever else the loop has to do waits for a second.

Owns their order. Never reads one.
"""

import asyncio
from collections import deque
from collections.abc import Callable

NUM_PER_TURN = 4
"""Other work of the loop waits for some thousandths of a second at most."""


class Arrivals:
    """Requests that have not begun."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._room = NUM_PER_TURN
        """Requests that may still begin in this turn."""

    def add(self, begin: Callable[[], None]) -> None:
        """Call `begin` now or in a later turn of the loop; in the order of the calls."""
        if self._room == NUM_PER_TURN:
            asyncio.get_running_loop().call_soon(self._turn)
        if self._room > 0:
            self._room -= 1
            begin()
        else:
            self._waiting.append(begin)

    def _turn(self) -> None:
        """Begin those that wait for this turn."""
        begun = min(NUM_PER_TURN, len(self._waiting))
        self._room = NUM_PER_TURN - begun
        if begun:
            asyncio.get_running_loop().call_soon(self._turn)
        for _ in range(begun):
            self._waiting.popleft()()
