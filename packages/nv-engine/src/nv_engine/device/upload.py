"""Upload: host values on their way to the device.

Owns that the host does not wait for it.
"""

from array import array
from typing import TypeAlias

import torch
from torch import Tensor

Packed: TypeAlias = "array[int]"
"""64-bit integers, typecode "q"."""


def upload(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host values to the device without waiting for it."""
    if isinstance(values, array):
        values = torch.frombuffer(values, dtype=torch.int64)
    host = torch.as_tensor(values, dtype=dtype, device="cpu")
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
