"""The card's compute capability and number of multiprocessors, each looked up once."""

from __future__ import annotations

from functools import cache

import torch


def is_hopper(tensor: torch.Tensor) -> bool:
    """Return whether the tensor lies on a card of compute capability 9.0 (wgmma, TMA, PDL)."""
    return tensor.is_cuda and capability(tensor.device) == 9


def converts_fp8(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's card converts e4m3 to fp16 in hardware (used from 9.0 on)."""
    return tensor.is_cuda and capability(tensor.device) >= 9


@cache
def capability(device: torch.device) -> int:
    """Return the major number; torch would look it up at each of a step's many calls."""
    return torch.cuda.get_device_capability(device)[0]


def num_multiprocessors(device: torch.device) -> int:
    """Count the card's multiprocessors; 8 for the interpreter on a CPU."""
    if device.type != "cuda":
        return 8
    return _multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
