"""The RMS norm, of the residual stream or of heads. Owns one weight, whole on every rank."""

from collections.abc import Iterator

import nv_kernels as nk
import torch
from torch import nn

from nv_models.placement import Placement, Shard


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv 1910.07467): a `nk.Norm`.

    A product that reads the normed stream takes the norm as an argument (`ColumnLinear`), and
    `nk.qk_norm_rope_store` takes the weights of the norms of heads. `forward` is for the last norm.
    """

    def __init__(
        self, size: int, eps: float, placement: Placement, source: str | None = None
    ) -> None:
        """Make the norm.

        Args:
            size: E, or D of a head.
            eps: added to the mean square.
            placement: of the weight.
            source: its name in the checkpoint, beside this one's; None: the module's own name.
        """
        super().__init__()
        self.weight = placement.empty(size)  # [E], or [D] of a head
        self.eps = eps
        self.source = source

    def forward(self, stream: nk.Stream) -> tuple[torch.Tensor, nk.Stream]:
        """Add what is pending to the stream: its normed values [T, E], and the stream itself."""
        return nk.normalise(stream, self)

    def shards(self, name: str) -> Iterator[Shard]:
        """The whole weight."""
        if self.source is not None:
            name = f"{name.rpartition('.')[0]}.{self.source}"
        yield Shard(self.weight, f"{name}.weight", tuple(self.weight.shape))
