"""Processes that send one load to a server together, with the client of `nv bench serve`.

One process of Python reads some tens of thousands of events per second; a server on a card may send
more. Each process takes an equal part of the requests, of their rate and of the streams in flight.
"""

import asyncio
import gc
import multiprocessing
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import NamedTuple

import uvloop
from nv_api.bench.client import Client, open_session
from nv_api.bench.load import Load
from nv_api.bench.outcome import Outcome
from nv_api.bench.pace import Run, run
from nv_api.bench.prompts import Prompt, random_prompts, read_tokenizer

LEAD_SECONDS = 0.1
"""From the order to start until the first request: all processes have read it by then."""
ALONE_RATE = 4.0
"""Requests per second that one process sends alone, so that the gaps are those of one draw."""


class Part(NamedTuple):
    """The share of one process."""

    outcomes: list[Outcome]
    began_at: float
    """Of `time.monotonic`, which all processes of a machine share."""
    ended_at: float
    cpu_share: float


class Generators:
    """Processes that wait for loads.

    Args:
        num: of processes.
        tokenizer: the folder of random prompts' ids.
    """

    def __init__(self, num: int, tokenizer: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for _ in range(num):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, tokenizer), daemon=True)
            process.start()
            self._ends.append(ours)
            self._processes.append(process)
        for end in self._ends:
            end.recv()

    def run(self, base_url: str, load: Load) -> Run:
        """Send a load and wait for all answers; `cpu_share` is that of the busiest process.

        Raises:
            RuntimeError: a process could not prepare its part.
        """
        loads = split(load, len(self._ends))
        ends = self._ends[: len(loads)]
        for end, each in zip(ends, loads, strict=True):
            end.send((base_url, each))
        if faults := [fault for end in ends if (fault := end.recv())]:
            for end in ends:
                end.send(None)
            raise RuntimeError(f"a generator did not start: {faults[0]}")
        began_at = time.monotonic() + LEAD_SECONDS
        # in turn, so that the first requests do not come together
        for rank, end in enumerate(ends):
            end.send(began_at + rank / load.request_rate)
        parts: list[Part] = [end.recv() for end in ends]
        seconds = max(each.ended_at for each in parts) - min(each.began_at for each in parts)
        outcomes = [outcome for each in parts for outcome in each.outcomes]
        return Run(outcomes, seconds, max(each.cpu_share for each in parts))

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
            process.join()


def split(load: Load, num: int) -> list[Load]:
    """Equal parts of a load, with different prompts; fewer than `num` if it is small."""
    num = 1 if load.request_rate <= ALONE_RATE else min(num, load.num_prompts)
    if load.random_prefix_len and load.random_num_prefixes % num:
        raise ValueError(
            f"random_num_prefixes is {load.random_num_prefixes}: it must be a multiple of the "
            f"{num} generators, which have prefixes of their own"
        )
    concurrency = load.max_concurrency
    return [
        replace(
            load,
            num_prompts=load.num_prompts // num + (rank < load.num_prompts % num),
            request_rate=load.request_rate / num,
            max_concurrency=None if concurrency is None else max(1, concurrency // num),
            random_num_prefixes=max(1, load.random_num_prefixes // num),
            seed=load.seed * 1000 + rank,
        )
        for rank in range(num)
    ]


def _serve(end: Connection, tokenizer_name: str) -> None:
    """A process's main."""
    tokenizer = read_tokenizer(tokenizer_name)
    gc.freeze()
    end.send(None)
    while True:
        base_url, load = end.recv()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_send(end, base_url, load, random_prompts(load, tokenizer)))
        gc.collect()


async def _send(end: Connection, base_url: str, load: Load, prompts: list[Prompt]) -> None:
    """Report that the part is ready, wait for its time, and return the outcomes."""
    async with open_session(load) as session:
        client = Client(session, base_url, load)
        try:
            name = (await client.first_model()).name
        except (OSError, ValueError) as error:
            end.send(str(error))
            end.recv()
            return
        end.send("")
        began_at = end.recv()
        if began_at is None:
            return
        await asyncio.sleep(max(0.0, began_at - time.monotonic()))
        began_at = time.monotonic()

        async def send(prompt: Prompt) -> Outcome:
            return replace(await client.send(prompt, name), text="")

        gc.disable()
        found = await run(prompts, load, send, lambda: None)
        gc.enable()
    end.send(Part(found.outcomes, began_at, began_at + found.seconds, found.cpu_share))
