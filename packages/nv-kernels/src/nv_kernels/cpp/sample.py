"""The draw of greedy rows in C++; that of all other rows in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.cpp.calls import kernel
from nv_kernels.sampling import torch_draw

if TYPE_CHECKING:
    from nv_kernels.sampling.parameters import SamplingTensors


def sample(logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """Draw; see `nv_kernels.reference.sample`. All-greedy rows take one pass over the logits."""
    call = kernel("greedy", logits.dtype)
    if call is None or bool(sampling.temperature.any()):
        return torch_draw.sample(logits, sampling)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, width = logits.shape
    ids = logits.new_empty(rows, dtype=torch.int64)  # [R]
    num_ids = width if sampling.num_ids is None else min(width, sampling.num_ids)
    sizes = (rows, logits.stride(0), num_ids)
    call(logits.data_ptr(), ids.data_ptr(), *sizes, torch.get_num_threads())
    return ids
