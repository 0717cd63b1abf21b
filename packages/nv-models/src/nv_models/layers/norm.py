"""RMS norm, fused with the residual sum. Owns: one weight, whole on every rank."""

from collections.abc import Iterator

import nv_kernels as nk
import torch
from torch import nn

from nv_models.placement import Placement, Shard


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv 1910.07467) of the residual stream."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(size)  # [E]
        self.eps = eps

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, E] -> norm of their sum, and the sum; without a residual the sum is x."""
        return nk.add_rms_norm(x, residual, self.weight, self.eps)

    def shards(self, name: str) -> Iterator[Shard]:
        """The whole weight."""
        yield Shard(self.weight, f"{name}.weight", tuple(self.weight.shape))
