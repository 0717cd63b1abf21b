"""Ring: drawn tokens on their way to the host, without a copy that the host would queue.

Owns the entries and how many the host has counted; the device counts the same steps for itself.
Never waits: the reader of an entry has waited for its step.
"""

import nv_kernels as nk
import torch
from torch import Tensor


class ResultRing:
    """One entry per step, used again after `num_entries` steps.

    Args:
        num_entries: more than the steps whose tokens are not read yet.
        num_rows: the most rows that sample in a step.
        device: where the steps run.
    """

    def __init__(self, num_entries: int, num_rows: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        entries = torch.zeros(
            num_entries, num_rows, dtype=torch.int64, device="cpu", pin_memory=pinned
        )
        self.tokens = nk.TokenRing(entries, torch.zeros(1, dtype=torch.int64, device=device))
        self._num_steps = 0

    def expect(self, num_steps: int) -> list[Tensor]:
        """The entries [num_rows] that the next steps write."""
        entries, first = self.tokens.entries, self._num_steps
        self._num_steps += num_steps
        return [entries[(first + step) % len(entries)] for step in range(num_steps)]

    def resync(self) -> None:
        """Count what the device has counted, after a step that broke off; waits for the device."""
        self._num_steps = int(self.tokens.count)
