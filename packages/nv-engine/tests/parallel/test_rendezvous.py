"""Groups of their own, beside torch's default one."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from nv_engine.device import rendezvous
from nv_engine.device.peers import open_peers
from nv_models import TensorParallel

CPU = torch.device("cpu")


def test_two_ranks_meet_and_torchs_default_group_stays_the_callers():
    store = rendezvous.open_store()

    def of(rank):
        own = store if rank == 0 else rendezvous.find_store(rendezvous.LOOPBACK, store.port)
        group = rendezvous.join(own, rank, 2, CPU)
        return rendezvous.smallest(5 - rank, TensorParallel(rank, 2, group), CPU)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(of, range(2))) == [4, 4]
    assert not dist.is_initialized()


def test_the_meeting_place_is_for_this_machine_alone():
    store = rendezvous.open_store()
    socket.create_connection((rendezvous.LOOPBACK, store.port), timeout=5).close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)  # of all addresses, another


def test_cpus_share_no_memory_for_sums():
    parallel = TensorParallel(0, 2, None)
    assert open_peers(None, parallel, CPU, 8, 64) is None
    one = TensorParallel()
    assert open_peers(None, one, torch.device("cuda"), 8, 64) is None


def test_the_private_names_that_joining_takes_are_there():
    """Also those that only cards need, which no test without one reaches."""
    for owner, names in {
        dist.ProcessGroup: ("_set_default_backend", "_register_backend"),
        dist.ProcessGroupGloo: ("_Options", "create_device"),
        dist.ProcessGroupGloo._Options: ("_timeout", "_devices"),
    }.items():
        assert set(names) <= set(dir(owner))
    if dist.is_nccl_available():
        assert "_timeout" in dir(dist.ProcessGroupNCCL.Options)
