"""RMS norms, of the residual stream and of heads. Owns: one weight, whole on every rank."""

from collections.abc import Iterator

from torch import nn

from nv_models.placement import Placement, Shard


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv 1910.07467): a `nk.Norm`.

    The op that reads the normed values applies it: `nk.norm_linear` and its kin.
    """

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(size)  # [E], or [D] of a head
        self.eps = eps

    def shards(self, name: str) -> Iterator[Shard]:
        """The whole weight."""
        yield Shard(self.weight, f"{name}.weight", tuple(self.weight.shape))
