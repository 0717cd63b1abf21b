"""The scales of a layer's fp8 KV cache that a quantized checkpoint has.

Owns their loading. Never quantizes a key.
"""

from collections.abc import Iterator

import torch
from torch import nn

from nv_models.placement import Placement
from nv_models.shard import Shard


class KVScales(nn.Module):
    """Two numbers of an attention layer: a stored key times `k` is the key, and so for values.

    Attributes:
        k: 1 unless the checkpoint has another; known once it is loaded.
        v: alike.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement
        self.loaded: dict[str, torch.Tensor] = {}
        self.k = self.v = 1.0

    def allocate(self, name: str) -> None:
        """Make the two tensors, if the checkpoint has them; random weights leave them 1."""
        scheme, attention = self.placement.scheme, name.rpartition(".")[0]
        if scheme is None or not scheme.has_kv_scales:
            return
        for each in ("k_scale", "v_scale"):
            source = f"{attention}.{each}"
            shape = scheme.kv_scale_shape(source)
            self.loaded[source] = torch.ones(
                shape, dtype=torch.float32, device=self.placement.device
            )

    def shards(self, name: str) -> Iterator[Shard]:
        """Both numbers, whole on every rank."""
        del name  # the tensors are kept by their names
        for source, target in self.loaded.items():
            yield Shard(target, source, tuple(target.shape))

    def finish(self) -> None:
        """Read the numbers.

        Raises:
            ValueError: one is not positive and finite.
        """
        for source, values in self.loaded.items():
            value = values.item()
            if not 0 < value < float("inf"):
                raise ValueError(
                    f"{source} is {value}: it must be positive and finite; download the "
                    "checkpoint again"
                )
        if self.loaded:
            self.k, self.v = (values.item() for values in self.loaded.values())
            self.loaded = {}
