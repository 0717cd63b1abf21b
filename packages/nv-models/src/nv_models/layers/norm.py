"""RMS norms: of the residual stream, of heads, and of a projection's heads together.

Owns their weights, which are whole on every rank. Never chooses a kernel.
"""

from collections.abc import Iterator

import nv_kernels as nk
import torch

from nv_models.config import NormKind
from nv_models.layers.layer import Layer
from nv_models.placement import Placement
from nv_models.shard import Shard

PLAIN = NormKind()


class RMSNorm(Layer):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv 1910.07467): a `nk.Norm`.

    A product that reads the normed stream takes the norm as an argument (`ColumnLinear`), and
    `nk.qk_norm_rope_store` takes the weights of the norms of heads. `forward` is for the last norm.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        placement: Placement,
        *,
        kind: NormKind = PLAIN,
        source: str | None = None,
    ) -> None:
        """Make the norm.

        Args:
            size: E, or D of a head.
            eps: added to the mean square.
            placement: of the weight.
            kind: how the weight multiplies.
            source: its name in the checkpoint, beside this one's; None: the module's own name.
        """
        super().__init__()
        dtype = torch.float32 if kind.in_fp32 else None
        self.weight = placement.empty(size, dtype=dtype)  # [E], or [D] of a head
        self.eps = eps
        self.kind = kind
        self.source = source

    def finish(self) -> None:
        """Add what the kind of norm adds to a loaded weight."""
        if self.kind.offset:
            self.weight.add_(self.kind.offset)

    def forward(self, stream: nk.Stream) -> tuple[torch.Tensor, nk.Stream]:
        """Add what is pending to the stream: its normed values [T, E], and the stream itself."""
        return nk.normalise(stream, self)

    def shards(self, name: str) -> Iterator[Shard]:
        """The whole weight."""
        if self.source is not None:
            name = f"{name.rpartition('.')[0]}.{self.source}"
        yield Shard(self.weight, f"{name}.weight", tuple(self.weight.shape))


class ProjectionNorm(Layer):
    """An RMS norm over all heads of a projection, of which a rank holds some (OLMo 2)."""

    def __init__(
        self,
        heads: int,
        kept: range,
        head_dim: int,
        eps: float,
        placement: Placement,
        *,
        kind: NormKind = PLAIN,
    ) -> None:
        super().__init__()
        dtype = torch.float32 if kind.in_fp32 else None
        self.weight = placement.empty(heads * head_dim, dtype=dtype)
        self.eps = eps
        self.parallel = placement.parallel
        self.kept = slice(kept.start * head_dim, kept.stop * head_dim)
        self.holders = self.parallel.size * len(kept) // heads  # ranks that hold the same heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm this rank's heads [T, its heads * D] by the mean square of all."""
        if self.parallel.size == 1:
            return nk.rms_norm(x.contiguous(), self.weight, self.eps)
        parts = self.parallel.all_gather_last(x).view(len(x), self.parallel.size, -1)
        whole = parts[:, :: self.holders].flatten(1)  # [T, all heads * D]
        return nk.rms_norm(whole, self.weight, self.eps)[:, self.kept]

    def shards(self, name: str) -> Iterator[Shard]:
        """The whole weight."""
        yield Shard(self.weight, f"{name}.weight", tuple(self.weight.shape))
