"""The causal masks of a step, as slices of one tensor.

Owns how they lie in memory. A CUDA kernel of `scaled_dot_product_attention` reads 16 bytes of a
mask at once: torch checks the strides for that, but not the address, and a slice at an
unaligned address destroys the process's CUDA context ("misaligned address").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ALIGNMENT = 16
"""In elements: each row of a mask starts at a multiple of it (32 bytes in a 16-bit dtype)."""


def aligned_width(num_keys: int) -> int:
    """Round a row of `num_keys` elements up to a multiple of ALIGNMENT."""
    return -(-num_keys // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class CausalMask:
    """Masks of up to `tile` queries over up to M keys.

    Attributes:
        values: [tile + ALIGNMENT - 1, W], 0 or -inf, W the `aligned_width` of M. The last row sees
            all, each row above it one key less; with a window, only the last so many of them.
    """

    values: torch.Tensor

    @classmethod
    def make(
        cls,
        tile: int,
        num_keys: int,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
    ) -> CausalMask:
        """Make the tensor of `values`: tile queries at most, over num_keys keys at most."""
        rows, width = tile + ALIGNMENT - 1, aligned_width(num_keys)
        all_keys = torch.ones(rows, width, dtype=torch.bool, device=device)
        hidden = all_keys.triu(width - rows + 1)
        if window is not None:
            hidden |= all_keys.tril(width - rows - window)
        values = torch.zeros(rows, width, dtype=dtype, device=device)
        return cls(values.masked_fill_(hidden, float("-inf")))

    def of_last(self, num_queries: int, num_keys: int) -> torch.Tensor:
        """Return the mask [num_queries, num_keys] of the last queries over the keys they may see.

        The same mask starts one row up and one column to the left, so the slice moves along the
        diagonal until its first column is aligned.
        """
        rows, width = self.values.shape
        moved = (width - num_keys) % ALIGNMENT
        last_row, first_key = rows - moved, width - num_keys - moved
        return self.values[last_row - num_queries : last_row, first_key : first_key + num_keys]
