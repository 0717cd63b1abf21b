"""Turns: a loop over many prompts that leaves the event loop free now and then.

Owns how much is done in one turn of it.
"""

import asyncio

NUM_PER_TURN = 32
"""Work on one prompt takes some tens of microseconds: others wait for two milliseconds at most."""


async def turn(number: int) -> None:
    """Before the work on prompt `number`: let what else is to be done run, every few prompts."""
    if number and number % NUM_PER_TURN == 0:
        await asyncio.sleep(0)
