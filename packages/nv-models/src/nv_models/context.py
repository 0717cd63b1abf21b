"""The inputs of a forward pass besides token ids.

Owns the record, which is an argument of every layer. Never a global.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import nv_kernels as nk
import torch


@dataclass(frozen=True)
class ForwardContext:
    """One step's view of the paged KV cache.

    Args:
        positions: [T] int, each token's position in its sequence.
        slot_mapping: [T] int, where its K and V go: block * block_size + offset; -1: not stored.
        attention: which rows belong to which sequence, and that sequence's blocks.
        plans: what `backend.plan(attention, windows)` returned for the windows of the model's
            layers, by window (None: a layer that reads all keys); layers of one window share one.
        backend: the attention implementation.
        kv_caches: one KVCache per layer; with fewer, only so many of the first layers run.
        lora: the adapter of each token, in the order of an `AdapterPool`'s slots; None: no token
            has one.
        lora_of_ends: the same for the embedding; None: no adapter of the step changes it.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    attention: nk.AttentionMetadata
    plans: Mapping[int | None, Any]
    backend: nk.AttentionBackend
    kv_caches: Sequence[nk.KVCache]
    lora: nk.LoraPlan | None = None
    lora_of_ends: nk.LoraPlan | None = None
