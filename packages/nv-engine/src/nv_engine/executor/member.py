"""Member: a process that holds one shard, from its start to its last step.

Owns that process's side of the connection: batches in, reports out. Does not depend on how it was
started.
"""

import logging
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, NamedTuple

import torch
from nv_models import TensorParallel, read_config
from torch.distributed.distributed_c10d import Store

from nv_engine.batch import Batch, StepResult
from nv_engine.config import EngineConfig
from nv_engine.device import rendezvous
from nv_engine.device.peers import open_peers
from nv_engine.device.start import choose_device
from nv_engine.executor.executor import Pending, RankWorker
from nv_engine.facts import ModelFacts
from nv_engine.log import forward

PING = b""
"""The message that asks a rank for a sign of life; any other is a batch."""
MakeWorker = Callable[[EngineConfig, TensorParallel], RankWorker]


TRAVELS = (ValueError, TypeError, NotImplementedError, ImportError, ModuleNotFoundError,
           OSError, FileNotFoundError, PermissionError, MemoryError)  # fmt: skip
"""Errors that the executor raises as what they are. Others it tells of: their classes may not be
where it is, or not survive the way."""


class RankSpec(NamedTuple):
    """The first message to a rank."""

    config: EngineConfig
    rank: int
    size: int
    store: tuple[str, int]
    """Address and port of the ranks' meeting place."""
    num_threads: int
    make_worker: MakeWorker
    host: str = rendezvous.LOOPBACK
    """This rank's machine, as the other ranks reach it."""
    peer_rows: int = 0
    """Rows at once of a sum through memory which the ranks' cards write into each other; 0 is for
    ranks that are not on one host, or not to use it."""
    answers: bool = False
    """True if this rank's results are wanted (every rank draws the same tokens)."""


class Report(NamedTuple):
    """A message from a rank to the process that started it."""

    stage: Literal["up", "log", "ready", "alive", "result", "failed"]
    text: str = ""
    """Of a failure: the traceback."""
    time: float = 0.0
    """Of a failure: seconds since the epoch, which the hosts of a cluster agree on roughly."""
    error: BaseException | None = None
    """Of a failure: the exception, if it is one of TRAVELS."""
    facts: ModelFacts | None = None
    """When ready."""
    num_steps: int = 0
    """Of a sign of life: steps that it has run."""
    result: StepResult | None = None
    record: logging.LogRecord | None = None
    """Of a line of the log."""


def build(spec: RankSpec, store: Store | None) -> RankWorker:
    """Join the group and load this rank's shard, on the thread that will run it."""
    torch.set_num_threads(spec.num_threads)  # of this thread's products
    device = choose_device(spec.config.device, spec.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = store or rendezvous.find_store(*spec.store)
    group = rendezvous.join(store, spec.rank, spec.size, device, spec.host)
    parallel = TensorParallel(spec.rank, spec.size, group)
    if spec.peer_rows and device.type == "cuda":
        width = read_config(Path(spec.config.model), spec.config.hf_overrides).hidden_size
        peers = open_peers(store, parallel, device, spec.peer_rows, width)
        parallel = replace(parallel, peers=peers)
    return spec.make_worker(spec.config, parallel)


def serve(connection: Connection, spec: RankSpec, store: Store | None = None) -> RankWorker:
    """Run a rank until the other end closes; an error is reported, then raised.

    Args:
        connection: to the process that started it.
        spec: of this rank.
        store: the ranks' meeting place, if this rank holds it.

    Returns:
        The worker. NCCL complains of a group that goes before its process does: keep it till then.
    """
    member = _Member(connection)
    try:
        return member.run(spec, store)
    except BaseException as error:
        member.report_failure(error)
        raise


class _Member:
    """The threads of a rank: one reads, one runs steps, one (where asked) waits for results."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._is_sending = threading.Lock()
        self._messages: SimpleQueue[bytes | BaseException | None] = SimpleQueue()
        self._results: SimpleQueue[Pending] = SimpleQueue()
        self._num_steps = 0

    def run(self, spec: RankSpec, store: Store | None) -> RankWorker:
        self._report(Report("up"))
        threading.Thread(target=self._read, daemon=True).start()
        if spec.answers:
            forward(lambda record: self._report(Report("log", record=record)))
        worker = build(spec, store)
        self._report(Report("ready", facts=worker.facts))
        if spec.answers:
            threading.Thread(target=self._answer, daemon=True).start()
        while (message := self._messages.get()) is not None:
            if isinstance(message, BaseException):
                raise message
            batch: Batch = pickle.loads(message)
            pending = worker.run(batch)
            self._num_steps += 1
            if spec.answers:
                self._results.put(pending)
        return worker

    def report_failure(self, error: BaseException) -> None:
        travels = type(error)(str(error)) if type(error) in TRAVELS else None
        text = "".join(traceback.format_exception(error))
        self._report(Report("failed", text, time.time(), travels))

    def _read(self) -> None:
        """Take messages off the connection as they come, also while a step runs."""
        with suppress(EOFError, OSError):  # the other end closed: no more steps
            while True:
                message = self._connection.recv_bytes()
                if message == PING:
                    self._report(Report("alive", num_steps=self._num_steps))
                else:
                    self._messages.put(message)
        self._messages.put(None)

    def _answer(self) -> None:
        try:
            while True:
                self._report(Report("result", result=self._results.get().result()))
        except BaseException as error:  # the thread that runs the steps raises it
            self._messages.put(error)

    def _report(self, report: Report) -> None:
        with suppress(OSError), self._is_sending:  # the other end may be closed
            self._connection.send(report)
