"""Peers: memory that the cards of one host write into each other.

Owns how it is found: CUDA's interprocess handles, by way of the driver's library, for torch has no
public call that opens a handle on the reader's own card. Never sums: `nv_kernels` does.
"""

import ctypes
from contextlib import suppress

import nv_kernels as nk
import torch
from nv_models import TensorParallel
from torch.distributed.distributed_c10d import PrefixStore, Store

from nv_engine.device.rendezvous import smallest

DRIVER = "libcuda.so.1"
LAZY_ENABLE_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle: passed by value."""

    _fields_ = (("reserved", ctypes.c_byte * 64),)


def open_peers(
    store: Store, parallel: TensorParallel, device: torch.device, max_rows: int, width: int
) -> nk.PeerBuffers | None:
    """Memory that the ranks' cards write into each other; every rank asks, and all or none get it.

    Args:
        store: the meeting place.
        parallel: this rank, in its group.
        device: its card; all ranks' are of one host.
        max_rows: of the largest sum that goes through it.
        width: columns of a sum, a multiple of 8.

    Returns:
        The buffers, or None: no cards, one rank, or cards that do not reach each other.
    """
    if device.type != "cuda" or parallel.size == 1:
        return None
    others = [rank for rank in range(parallel.size) if rank != parallel.rank]
    reached = all(torch.cuda.can_device_access_peer(device, other) for other in others)
    if not smallest(int(reached and width % 8 == 0), parallel, device):
        return None
    shape = (2, parallel.size, max_rows, width // 2)
    own = torch.full(shape, nk.PeerBuffers.EMPTY, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)  # all buffers are empty before a rank writes
    shared = PrefixStore("nv_engine.peers", store)
    peers = None
    with suppress(OSError):
        peers = nk.PeerBuffers.at(parallel.rank, own, _addresses(shared, parallel, own))
    return peers if smallest(int(peers is not None), parallel, device) else None


def _addresses(store: Store, parallel: TensorParallel, own: torch.Tensor) -> list[int]:
    """Where this rank's card finds the buffers of all.

    Raises:
        OSError: the driver refused, here or at another rank.
    """
    try:
        offered = _offer(own.data_ptr())
    except OSError:
        store.set(str(parallel.rank), "")  # the other ranks must not wait for it
        raise
    store.set(str(parallel.rank), offered.hex())
    return [
        own.data_ptr()
        if rank == parallel.rank
        else _open(bytes.fromhex(store.get(str(rank)).decode()))
        for rank in range(parallel.size)
    ]


def _offer(address: int) -> bytes:
    """The allocation that an address of this card lies in, and its distance from the start."""
    start, handle = ctypes.c_uint64(), _Handle()
    _call("cuMemGetAddressRange_v2", ctypes.byref(start), None, ctypes.c_uint64(address))
    _call("cuIpcGetMemHandle", ctypes.byref(handle), start)
    return bytes(handle) + (address - start.value).to_bytes(8, "little")


def _open(offered: bytes) -> int:
    """The address here of what another process offered; mapped until this process ends."""
    size = ctypes.sizeof(_Handle)
    if len(offered) <= size:
        raise OSError("another rank could not offer its memory")
    start, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(offered)
    flags = ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(start), handle, flags)
    return start.value + int.from_bytes(offered[size:], "little")


def _call(name: str, *arguments: object) -> None:
    """Call the driver, in the context that torch made for this thread's card."""
    error = getattr(ctypes.CDLL(DRIVER), name)(*arguments)
    if error:
        raise OSError(f"{name} of {DRIVER} gave error {error}")
