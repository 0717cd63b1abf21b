"""The scales of a layer's fp8 KV cache that a quantized checkpoint has.

Owns their loading. Never quantizes a key.
"""

from collections.abc import Iterator

import torch

from nv_models.layers.layer import Layer
from nv_models.placement import Placement
from nv_models.quantization.scheme import Scheme
from nv_models.shard import Shard


class KVScales(Layer):
    """Two numbers of an attention layer: a stored key times `k` is the key, and so for values.

    Attributes:
        k: known once it is loaded.
        v: alike.
    """

    def __init__(self, scheme: Scheme, placement: Placement) -> None:
        """Make the scales of a checkpoint whose scheme has some."""
        super().__init__()
        self.scheme, self.device = scheme, placement.device
        self.loaded: dict[str, torch.Tensor] = {}
        self.k = self.v = 1.0

    def allocate(self, name: str) -> None:
        """Make the two tensors; random weights leave them 1."""
        attention = name.rpartition(".")[0]
        for each in ("k_scale", "v_scale"):
            source = f"{attention}.{each}"
            shape = self.scheme.kv_scale_shape(source)
            self.loaded[source] = torch.ones(shape, dtype=torch.float32, device=self.device)

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
        self.k, self.v = (values.item() for values in self.loaded.values())
        self.loaded = {}
