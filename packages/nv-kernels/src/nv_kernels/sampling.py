"""What a sampler is told about its rows: plain tensors and two host flags.

Owns the type. Never draws: `nv_kernels.reference.sampling` defines the draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters of R rows, each [R] on the logits' device.

    Attributes:
        temperature: fp32; 0 is greedy.
        top_k: int32; 0 is off, more than V keeps all.
        top_p: fp32 in (0, 1]; 1 is off.
        min_p: fp32 in [0, 1]; 0 is off.
        seeds: int64 key of the draw, all 64 bits used.
        positions: int64 position of the token to be drawn, low 32 bits used.
        all_greedy: host flag; every temperature is 0.
        any_filter: host flag; some row has top_k, top_p or min_p. False promises that none has.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    all_greedy: bool
    any_filter: bool
