"""Where a model's tensors live.

Owns Placement, which every layer takes as an argument. Never reads a file.
"""

from dataclasses import dataclass

import nv_kernels as nk
import torch
from torch import nn

from nv_models.parallel import TensorParallel
from nv_models.quantization.scheme import Scheme


@dataclass(frozen=True)
class Placement:
    """One rank's share of a model, on one device.

    Attributes:
        device: of all tensors.
        dtype: of those that are not quantized, and of activations.
        parallel: this rank in its group.
        arithmetic: that makes weights and sums.
        scheme: of a quantized checkpoint; None: all weights are floats.
    """

    device: torch.device
    dtype: torch.dtype
    parallel: TensorParallel
    arithmetic: nk.Arithmetic
    scheme: Scheme | None = None

    def rank_sum(self) -> nk.RankSum | None:
        """The sum over the ranks in which a row layer's products end; None with one rank."""
        return None if self.parallel.size == 1 else self.arithmetic.rank_sum(self.parallel)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialized parameter that never asks for a gradient; None: the model's dtype."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)

    def zeros(self, *shape: int) -> nn.Parameter:
        """A parameter of zeros that never asks for a gradient."""
        tensor = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)
