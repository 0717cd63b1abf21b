"""ProcessExecutor: several ranks on one host, each with a shard of the model.

Owns their start: rank 0 is a thread here, the others are processes.
"""

from collections.abc import Sequence

import torch

from nv_engine.config import EngineConfig
from nv_engine.device import distributed
from nv_engine.device.worker import Worker, choose_device
from nv_engine.executor.rank import MakeWorker, Member, RankSpec
from nv_engine.executor.ranked import Patience, RankedExecutor, RankZero, located
from nv_engine.executor.ranks import Ranks
from nv_engine.executor.spawn import SpawnedRank


class ProcessExecutor(RankedExecutor):
    """Runs batches on `tensor_parallel_size` ranks of this host."""

    def __init__(
        self,
        config: EngineConfig,
        make_worker: MakeWorker = Worker,
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
        """
        config = _with_cards(located(config))
        size = config.tensor_parallel_size
        num_threads = max(1, torch.get_num_threads() // size)
        store = distributed.open_store()
        address = (distributed.LOOPBACK, store.port)
        specs = [
            RankSpec(config, rank, size, address, num_threads, make_worker) for rank in range(size)
        ]
        member = Member(specs[0], store)
        ranks = spawn(specs[1:], size)
        super().__init__(ranks, RankZero(member.build, member.abort), patience=patience)


def spawn(specs: Sequence[RankSpec], size: int) -> Ranks:
    """Start a process a spec, and wait until all are up.

    Raises:
        RuntimeError: a process did not come up.
    """
    started: list[SpawnedRank] = []
    try:
        started += (SpawnedRank(spec) for spec in specs)
        ranks = Ranks(started, size)
        while not ranks.reached("up"):
            pass
    except BaseException:
        Ranks(started, size).stop(0)
        raise
    return ranks


def _with_cards(config: EngineConfig) -> EngineConfig:
    """See that each rank has a device."""
    size = config.tensor_parallel_size
    devices = [choose_device(config.device, rank) for rank in range(size)]
    if devices[0].type == "cuda" and len(set(devices)) < size:
        raise ValueError(
            f'device is {config.device!r} and tensor_parallel_size is {size}: use "cuda", so '
            "that each rank has a card of its own"
        )
    return config
