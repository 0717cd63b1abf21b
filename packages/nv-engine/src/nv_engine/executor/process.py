"""ProcessExecutor: several ranks on one host, each with a shard of the model.

Owns rank 0 (a thread here) and the other ranks (processes), and what a failure of any of them
means: the executor is dead, says why from then on, and leaves nothing behind.
"""

import os
import time
import weakref
from dataclasses import replace

import torch
from nv_models import ModelConfig, TensorParallel, resolve

from nv_engine.batch import Batch, StepResult
from nv_engine.config import EngineConfig
from nv_engine.device import distributed
from nv_engine.device.worker import Worker, choose_device
from nv_engine.executor.base import ModelFacts, Pending, RankPending
from nv_engine.executor.rank import MakeWorker, RankSpec, start_worker
from nv_engine.executor.ranks import POLL_SECONDS, SETTLE_SECONDS, Ranks
from nv_engine.executor.shard import Outcome, Shard

CLOSE_SECONDS = 3.0
READY_SECONDS = 50e-6


class ProcessExecutor:
    """Runs batches on `tensor_parallel_size` ranks of this host."""

    def __init__(self, config: EngineConfig, make_worker: MakeWorker = Worker) -> None:
        """Start the ranks and load the model.

        Args:
            config: the options.
            make_worker: makes a rank's worker, in the rank's process, which imports it by name.

        Raises:
            ValueError: the ranks do not divide the model, or there are too few cards; no process
                was started.
            RuntimeError: a rank failed or died; the message names it and has its traceback.
        """
        config = _checked(config)
        size = config.tensor_parallel_size
        num_threads = max(1, torch.get_num_threads() // size)
        store = distributed.open_store()
        specs = [
            RankSpec(config, rank, size, store.port, num_threads, make_worker)
            for rank in range(size)
        ]
        self._failure: str | None = None
        self._ranks = Ranks(specs[1:])
        self._shard = Shard(lambda: start_worker(specs[0], store), self._ranks.send)
        self._stop = weakref.finalize(self, _close, os.getpid(), self._shard, self._ranks)
        try:
            self._facts = self._load()
        except BaseException:
            self._ranks.kill()
            self._stop()
            raise

    def _load(self) -> ModelFacts:
        """Wait for all ranks. A wrong checkpoint or option is rank 0's own error too."""
        loaded = self._shard.loaded
        while not loaded.wait(POLL_SECONDS):
            if self._ranks.failure() is not None:
                loaded.wait(SETTLE_SECONDS)
                break
        if loaded.error is None or isinstance(loaded.error, RuntimeError):
            if loaded.error is not None:
                self._ranks.failure(SETTLE_SECONDS)  # it may be what rank 0 stumbled over
            self._ranks.check()
        facts = loaded.get()
        while not self._ranks.reached("ready"):
            pass
        return facts

    @property
    def facts(self) -> ModelFacts:
        """The loaded model's facts."""
        return self._facts

    @property
    def process_ids(self) -> list[int]:
        """Process ids of ranks 1 and up."""
        return self._ranks.process_ids

    def submit(self, batch: Batch) -> Pending:
        """Queue one step on every rank."""
        self._check()
        return _ProcessPending(self, self._shard.submit(batch))

    def close(self) -> None:
        """End the ranks; a second call does nothing."""
        self._stop()

    def wait(self, step: Outcome[RankPending]) -> StepResult:
        """Wait for a step, and for news of a rank that died."""
        while not step.wait(POLL_SECONDS):
            self._check()
        try:
            pending = step.get()
            while not pending.is_ready:
                self._check()
                time.sleep(READY_SECONDS)
            return pending.result()
        except (RuntimeError, OSError) as error:
            if self._failure is not None:
                raise
            text = self._ranks.failure(SETTLE_SECONDS)
            self._fail(text or f"rank 0 of {self._ranks.size} failed: {error}")
            raise RuntimeError(self._failure) from error

    def _check(self) -> None:
        """Raise if a rank is gone, or all of them."""
        if self._failure is None and not self._stop.alive:
            raise RuntimeError("the engine is closed: make a new one")
        if self._failure is None and (text := self._ranks.failure()) is not None:
            self._fail(text)
        if self._failure is None and (error := self._shard.error) is not None:
            self._fail(f"rank 0 of {self._ranks.size} failed in an earlier step: {error}")
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def _fail(self, text: str) -> None:
        """Nothing runs any more: end what is left of the ranks."""
        self._failure = f"{text}\n(make a new engine: this one has lost a rank)"
        self._ranks.kill()
        self._stop()


class _ProcessPending:
    """A step on its way through all ranks."""

    def __init__(self, executor: ProcessExecutor, step: Outcome[RankPending]) -> None:
        self._executor, self._step = executor, step

    def result(self) -> StepResult:
        """Wait for the step."""
        return self._executor.wait(self._step)


def _checked(config: EngineConfig) -> EngineConfig:
    """Find the model once for all ranks, and see that they can share it and have a device each."""
    folder = resolve(config.model, config.revision)
    model, size = ModelConfig.from_path(folder), config.tensor_parallel_size
    parallel = TensorParallel(0, size)
    parallel.split(model.num_q_heads, "num_attention_heads")
    parallel.split_kv_heads(model.num_kv_heads)
    parallel.split(model.intermediate_size, "intermediate_size")
    devices = [choose_device(config.device, rank) for rank in range(size)]
    if devices[0].type == "cuda" and len(set(devices)) < size:
        raise ValueError(
            f'device is {config.device!r} and tensor_parallel_size is {size}: use "cuda", so '
            "that each rank has a card of its own"
        )
    return replace(config, model=str(folder))


def _close(owner: int, shard: Shard, ranks: Ranks) -> None:
    """End thread and processes, in the process that started them (a fork of it leaves them)."""
    if os.getpid() != owner:
        return
    try:
        if not shard.close(CLOSE_SECONDS):
            ranks.kill()
            shard.close(CLOSE_SECONDS)  # what it waited for is gone
    finally:
        ranks.stop(CLOSE_SECONDS)
