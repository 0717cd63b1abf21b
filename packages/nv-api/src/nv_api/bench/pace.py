"""Pace: requests sent at a rate, some at most in flight.

Owns the clock of a benchmark. Never knows how a request is sent.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter, process_time
from typing import NamedTuple

import numpy as np

from nv_api.bench.load import INFINITY, Load
from nv_api.bench.outcome import Outcome
from nv_api.bench.prompts import Prompt


class Run(NamedTuple):
    """The outcomes of all requests, in the order in which they were sent."""

    outcomes: list[Outcome]
    seconds: float
    """From the first request to the last answer."""
    cpu_share: float
    """Of one core, used by this process meanwhile; near 1, the client is the bottleneck."""

    @property
    def whole(self) -> list[Outcome]:
        """The outcomes without an error."""
        return [each for each in self.outcomes if not each.error]


def offsets(load: Load) -> list[float]:
    """When each request is sent, in seconds after the first.

    The gaps have a gamma distribution whose shape is `burstiness`; 1 is a Poisson process.
    """
    if load.request_rate == INFINITY:
        return [0.0] * load.num_prompts
    rng = np.random.default_rng(load.seed)
    scale = 1 / (load.request_rate * load.burstiness)
    gaps = rng.gamma(load.burstiness, scale, load.num_prompts - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


async def run(
    prompts: Sequence[Prompt],
    load: Load,
    send: Callable[[Prompt], Awaitable[Outcome]],
    on_done: Callable[[], object],
) -> Run:
    """Send all prompts at the load's pace, and wait for the answers.

    Args:
        prompts: as many as the load has.
        load: gives the pace.
        send: sends one and returns its outcome.
        on_done: called after each.
    """
    gate = asyncio.Semaphore(load.max_concurrency or len(prompts))

    async def one(prompt: Prompt) -> Outcome:
        async with gate:
            outcome = await send(prompt)
        on_done()
        return outcome

    began_at, cpu = perf_counter(), process_time()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for prompt, offset in zip(prompts, offsets(load), strict=True):
            await asyncio.sleep(max(0.0, began_at + offset - perf_counter()))
            tasks.append(group.create_task(one(prompt)))
    seconds = perf_counter() - began_at
    return Run([task.result() for task in tasks], seconds, (process_time() - cpu) / seconds)
