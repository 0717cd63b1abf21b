"""The `batch_invariant` backend: a token's attention is bitwise the same in every step.

Owns the choice between the card's version and the CPU's. Never attends.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from nv_kernels.attention.cpu import CPUAttention

if TYPE_CHECKING:
    from nv_kernels.attention.base import AttentionBackend
    from nv_kernels.metadata import AttentionShape


def batch_invariant_attention(shape: AttentionShape, reason: str) -> AttentionBackend:
    """Build the backend.

    Args:
        shape: what it is for.
        reason: why it was picked.

    Raises:
        ValueError: a shape that the card's kernel was not written for.
    """
    if shape.device.type == "cpu":
        try:
            return CPUAttention(shape, reason, "batch_invariant")
        except ValueError:  # a machine or a shape without a kernel: torch's ops take any
            pass
    module, name = "batch_invariant_torch", "BatchInvariantTorchAttention"
    if shape.device.type == "cuda":
        module, name = "batch_invariant_triton", "BatchInvariantTritonAttention"
    built = vars(importlib.import_module(f"nv_kernels.attention.{module}"))[name](shape, reason)
    return cast("AttentionBackend", built)
