"""Memory for the result of a product."""

from __future__ import annotations

import torch


def empty_result(
    parts: int, tokens: int, outputs: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocate [T, N], or fp32 partials [P, T, N] if P programs share K.

    Args:
        parts: P; 1: one program sums all of K.
        tokens: T.
        outputs: N, after the gate if there is one.
        dtype: of the whole result; partials are fp32.
        device: where the kernel runs.
    """
    if parts > 1:
        return torch.empty(parts, tokens, outputs, dtype=torch.float32, device=device)
    return torch.empty(tokens, outputs, dtype=dtype, device=device)
