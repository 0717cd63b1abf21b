"""Upload: host values on their way to the device.

Owns that the host does not wait for it.
"""

import torch
from torch import Tensor


def upload(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host values to the device without waiting for it."""
    host = torch.as_tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
