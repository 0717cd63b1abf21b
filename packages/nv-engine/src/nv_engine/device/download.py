"""Download: values of the device on their way to the host.

Owns that the host does not wait for them.
"""

import torch
from torch import Tensor


def to_host(part: Tensor) -> Tensor:
    """Queue a copy to the host; nothing is there until the stream got so far."""
    if not part.is_cuda:
        return part
    host = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=True)
    return host.copy_(part, non_blocking=True)
