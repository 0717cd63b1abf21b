"""A spawned rank: the process that holds one shard and repeats every step of rank 0.

Owns what such a process does from its first line to its last. Never decides anything: it reads
batches from its pipe and says when it is up, when it is ready, and why it failed.
"""

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

import torch
from nv_models import TensorParallel
from torch._C._distributed_c10d import Store

from nv_engine.config import EngineConfig
from nv_engine.device import distributed
from nv_engine.device.worker import choose_device
from nv_engine.executor.base import RankWorker

PARENT_CHECK_SECONDS = 0.5
MakeWorker = Callable[[EngineConfig, TensorParallel], RankWorker]


class RankSpec(NamedTuple):
    """What a rank is told before anything else."""

    config: EngineConfig
    rank: int
    size: int
    port: int
    num_threads: int
    make_worker: MakeWorker


class Report(NamedTuple):
    """What a rank tells its parent."""

    stage: Literal["up", "ready", "failed"]
    text: str = ""
    """Of a failure: the traceback."""
    time: float = 0.0
    """Of a failure: on the clock that all processes of a host share."""


def start_worker(spec: RankSpec, store: Store) -> RankWorker:
    """Join the group and load this rank's shard, on the thread that will run it."""
    torch.set_num_threads(spec.num_threads)  # of this thread's products
    device = choose_device(spec.config.device, spec.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = distributed.join(store, spec.rank, spec.size, device)
    return spec.make_worker(spec.config, TensorParallel(spec.rank, spec.size, group))


def main() -> None:
    """Run a rank: the arguments are its pipe's file number and its parent's process id."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    connection, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        _serve(connection)
    except BaseException:
        _report(connection, Report("failed", traceback.format_exc(), time.monotonic()))
        os._exit(1)
    os._exit(0)  # at once: nothing here outlives the process, and taking torch down takes a second


def _serve(connection: Connection) -> None:
    spec: RankSpec = pickle.loads(connection.recv_bytes())
    _report(connection, Report("up"))
    worker = start_worker(spec, distributed.find_store(spec.port))
    _report(connection, Report("ready"))
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return  # the parent closed its end: no more steps
        worker.run(pickle.loads(message))


def _report(connection: Connection, report: Report) -> None:
    with suppress(OSError):  # nobody may be left to read it
        connection.send(report)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, whatever it waits for."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)
