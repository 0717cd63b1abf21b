"""Workers for ranks under test: real ones with an ear on them, and ones without a model."""

import os
import signal
import sys
import time
import types
from pathlib import Path
from unittest.mock import patch

import nv_kernels as nk
import torch
from nv_engine.batch import StepResult
from nv_engine.device import start
from nv_engine.device.start import start_runner
from nv_engine.facts import ModelFacts


class Done:
    """A result that is there."""

    def __init__(self, token_ids):
        self._result = StepResult(token_ids)

    def result(self):
        return self._result


class Echo:
    """Draws, for each step, the sum of the batch's tokens as every rank sees it."""

    facts = ModelFacts(
        vocab_size=1000, eos_token_ids=(), max_model_len=100, num_blocks=10, block_size=16
    )

    def __init__(self, config, parallel):
        self.parallel = parallel

    def run(self, batch):
        own = torch.tensor([sum(batch.chunks[0].token_ids)])
        return Done([self.parallel.all_gather_last(own).tolist()])


class Recording:
    """A worker whose draws are written down, a line a step."""

    def __init__(self, worker, path):
        self.facts, self.worker, self.path = worker.facts, worker, path

    def run(self, batch):
        pending = self.worker.run(batch)
        with self.path.open("a") as file:
            print(pending.result().token_ids, file=file)
        return pending


def record(folder, memory, config, parallel):
    """A real worker on a rank with `memory[rank]` bytes; its draws go to folder/ids.RANK."""
    with patch.object(start, "available_host_memory", lambda: memory[parallel.rank]):
        worker = start_runner(config, parallel)
    return Recording(worker, Path(folder) / f"ids.{parallel.rank}")


class Interrupting:
    """A worker that sends Ctrl-C to the waiting caller in the middle of some of rank 0's steps."""

    def __init__(self, worker, rank):
        self.facts = worker.facts
        self.worker, self.rank, self.num_steps = worker, rank, 0

    def run(self, batch):
        self.num_steps += 1
        if self.rank == 0 and self.num_steps in (3, 7):
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.3)
        return self.worker.run(batch)


def interrupt(config, parallel):
    return Interrupting(start_runner(config, parallel), parallel.rank)


def raise_on(rank, error, config, parallel):
    if parallel.rank == rank:
        raise error
    return start_runner(config, parallel)


def exit_on(rank, config, parallel):
    if parallel.rank == rank:
        os._exit(3)
    return start_runner(config, parallel)


class Odd(Exception):
    """Cannot be made again from what it was made of."""

    def __init__(self, one, two):
        super().__init__(one)

    def __reduce__(self):
        raise ValueError("it stays here")


def raise_odd(rank, config, parallel):
    raise_on(rank, Odd("odd", "ball"), config, parallel)


def raise_unknown(rank, config, parallel):
    """An error of a class that only this process has."""
    module = types.ModuleType("only_here")
    module.Lost = type("Lost", (Exception,), {"__module__": "only_here"})
    sys.modules["only_here"] = module
    raise_on(rank, module.Lost("no such class"), config, parallel)


def stop_on(rank, config, parallel):
    if parallel.rank == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    return Echo(config, parallel)


class FailAtFive(Echo):
    def run(self, batch):
        if self.parallel.rank == 1 and batch.chunks[0].token_ids == (5,):
            raise ValueError("five is right out")
        return super().run(batch)


def fail_at_five(config, parallel):
    return FailAtFive(config, parallel)


class Sleepy(Echo):
    """Sleeps on rank 1, for as many tenths of a second as the batch's token says."""

    def run(self, batch):
        if self.parallel.rank == 1:
            time.sleep(batch.chunks[0].token_ids[0] / 10)
        return super().run(batch)


def sleep(config, parallel):
    return Sleepy(config, parallel)


class Summing(Echo):
    """Sums over two cards inside the norm, against the library's sum and the norm of it.

    Draws how many values of the sums differ, how many of the norms differ by more than rounding,
    and how many rows one of the cards has summed.
    """

    heights = (1, 7, 256, 64, 16, 256, 2500)
    num_replays = 3

    def __init__(self, config, parallel):
        super().__init__(config, parallel)
        self.peers = parallel.peers
        assert self.peers is not None, "the cards reach each other"
        self.device = self.peers.counts.device

    def draw(self, seed, *shape):
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.randn(*shape, generator=generator, device=self.device)
        return values.bfloat16()

    def run(self, batch):
        wrong = torch.zeros(2, dtype=torch.int64, device=self.device)
        weight = self.draw(1, self.peers.width)
        for step, height in enumerate(self.heights):
            self.sum_once(2 * step, height, weight, wrong)
        self.sum_in_a_graph(weight, wrong)
        return Done([[*wrong.tolist(), int(self.peers.counts.sum())]])

    def sum_once(self, seed, height, weight, wrong):
        part = self.draw(100 + seed + self.parallel.rank, height, self.peers.width)
        residual = self.draw(200 + seed, height, self.peers.width)
        found = nk.all_reduce_add_rms_norm(part, residual, weight, 1e-6, self.peers)
        self.compare(found, part, residual, weight, wrong)

    def sum_in_a_graph(self, weight, wrong):
        part, residual = (torch.zeros_like(self.draw(1, 16, self.peers.width)) for _ in range(2))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            first = nk.all_reduce_add_rms_norm(part, residual, weight, 1e-6, self.peers)
            second = nk.all_reduce_add_rms_norm(first[0], first[1], weight, 1e-6, self.peers)
        for seed in range(self.num_replays):
            part.copy_(self.draw(300 + 2 * seed + self.parallel.rank, 16, self.peers.width))
            residual.copy_(self.draw(400 + seed, 16, self.peers.width))
            graph.replay()
            self.compare(first, part, residual, weight, wrong)
            self.compare(second, *first, weight, wrong)

    def compare(self, found, part, residual, weight, wrong):
        """Two values sum in one way only, so the sums are equal; norms add in an order."""
        total = self.parallel.all_reduce(part.clone())
        out, total = nk.add_rms_norm(total, residual, weight, 1e-6)
        wrong[0] += (found[1] != total).sum()
        wrong[1] += (~torch.isclose(found[0], out, rtol=2**-6, atol=1e-3)).sum()


def sum_in_norm(config, parallel):
    return Summing(config, parallel)
