"""ProcessExecutor: several ranks on one host, each with a shard of the model.

Owns their start. Every rank is a process, rank 0 too: what a card does for a process that has ended
is over, whatever it waited for.
"""

import time
from collections.abc import Sequence

import torch

from nv_engine.config import EngineConfig
from nv_engine.device import rendezvous
from nv_engine.device.start import choose_device, start_runner
from nv_engine.executor.member import MakeWorker, RankSpec
from nv_engine.executor.parallel import ParallelExecutor, Patience, located
from nv_engine.executor.spawn import SpawnedRank
from nv_engine.executor.watch import RankWatch

PEER_ROWS = 256
"""Most tokens of a step whose sums go through memory that the cards write into each other.

NCCL does longer ones, for it has more bandwidth: it shares out what here every rank reads. Between
two ranks it has not, and all sums go there, PAIR_ROWS at a time.
"""
PAIR_ROWS = 1024
START_SECONDS = 120.0
"""For a process to start and import torch."""


class ProcessExecutor(ParallelExecutor):
    """Runs batches on `tensor_parallel_size` ranks of this host."""

    def __init__(
        self,
        config: EngineConfig,
        make_worker: MakeWorker = start_runner,
        patience: Patience | None = None,
    ) -> None:
        """Start the ranks and load the model.

        Args:
            config: the options.
            make_worker: makes a rank's worker, in the rank's process, which imports it by name.
            patience: when a rank that lives, and does not answer, is given up.

        Raises:
            ValueError: the ranks do not divide the model, or there are too few cards; no process
                was started.
            RuntimeError: a rank failed or died; the message names it and has its traceback.
            Exception: of a rank, if it is not a RuntimeError: a wrong checkpoint or option.
        """
        config = _with_cards(located(config))
        size = config.tensor_parallel_size
        peer_rows = PAIR_ROWS if size == 2 else PEER_ROWS
        num_threads = max(1, torch.get_num_threads() // size)
        self._store = rendezvous.open_store()  # where the ranks meet
        address = (rendezvous.LOOPBACK, self._store.port)
        specs = [
            RankSpec(
                config,
                rank,
                size,
                address,
                num_threads,
                make_worker,
                peer_rows=0 if config.disable_custom_all_reduce else peer_rows,
                answers=rank == 0,
            )
            for rank in range(size)
        ]
        super().__init__(spawn(specs), patience=patience)


def spawn(specs: Sequence[RankSpec]) -> RankWatch:
    """Start one process per spec, and wait until all are up.

    Raises:
        RuntimeError: a process did not come up.
        Exception: a rank was up and failed before all were; see `RankWatch.reached`.
    """
    started: list[SpawnedRank] = []
    try:
        started += (SpawnedRank(spec) for spec in specs)
    except BaseException:
        for rank in started:
            rank.kill()
            rank.reap()
        raise
    ranks = RankWatch(started, len(specs))
    deadline = time.monotonic() + START_SECONDS
    try:
        while not ranks.reached("up"):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{ranks.late('up')} has not come up in {START_SECONDS:g} s: the process is "
                    "stopped, or this machine does too much else"
                )
    except BaseException:
        ranks.stop(0)
        raise
    return ranks


def _with_cards(config: EngineConfig) -> EngineConfig:
    """Check that each rank has a device."""
    size = config.tensor_parallel_size
    devices = [choose_device(config.device, rank) for rank in range(size)]
    if devices[0].type == "cuda" and len(set(devices)) < size:
        raise ValueError(
            f'device is {config.device!r} and tensor_parallel_size is {size}: use "cuda", so '
            "that each rank has a card of its own"
        )
    return config
