"""What a forward pass needs besides token ids, handed down as an argument.

Owns: the record. Never: a global, a default or a decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import nv_kernels as nk
import torch


@dataclass(frozen=True)
class ForwardContext:
    """One step's view of the paged KV cache.

    Args:
        positions: [T] int, each token's position in its sequence.
        slot_mapping: [T] int, where its K and V go: block * block_size + offset; -1 is nowhere.
        attention: which rows belong to which sequence, and that sequence's blocks.
        plan: what `backend.plan(attention)` returned, shared by all layers.
        backend: the attention implementation.
        kv_caches: one KVCache a layer.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    attention: nk.AttentionMetadata
    plan: Any
    backend: nk.AttentionBackend
    kv_caches: Sequence[nk.KVCache]
