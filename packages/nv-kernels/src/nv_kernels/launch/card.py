"""What a launch asks of the card: its capability and the number of its multiprocessors.

Owns both, each looked up once. Never launches.
"""

from __future__ import annotations

from functools import cache

import torch


def is_hopper(tensor: torch.Tensor) -> bool:
    """Return whether the tensor lies on a card of compute capability 9.0 (wgmma, TMA, PDL)."""
    return tensor.is_cuda and capability(tensor.device) == 9


def converts_fp8(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's card converts e4m3 to fp16 in hardware (asked from 9.0 on)."""
    return tensor.is_cuda and capability(tensor.device) >= 9


@cache
def capability(device: torch.device) -> int:
    """Return the major number; torch looks it up anew each time, and a step asks often."""
    return torch.cuda.get_device_capability(device)[0]


def num_multiprocessors(device: torch.device) -> int:
    """Count the card's multiprocessors; 8 stands in where the interpreter runs on a CPU."""
    if device.type != "cuda":
        return 8
    return _multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
