"""RMS norm. Owns: one weight, whole on every rank; `nv_kernels.linear.chain` applies it."""

from collections.abc import Iterator

from torch import nn

from nv_models.placement import Placement, Shard


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv 1910.07467) of the residual stream."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(size)  # [E]
        self.eps = eps

    def shards(self, name: str) -> Iterator[Shard]:
        """The whole weight."""
        yield Shard(self.weight, f"{name}.weight", tuple(self.weight.shape))
