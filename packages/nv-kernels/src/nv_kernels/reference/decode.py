"""A decode step's attention straight from the projection.

Owns the definition: the op of `rope`, then that of `attention`. Never meant for a hot path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nv_kernels.reference.attention import attention
from nv_kernels.reference.rope import qk_norm_rope_store

if TYPE_CHECKING:
    import torch

    from nv_kernels.kv import KVCache
    from nv_kernels.metadata import AttentionMetadata


def attend_decode(  # noqa: PLR0917  the projection's own order
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    kv: KVCache,
    slot_mapping: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Norm, rotate, store and attend, where every sequence has one token.

    Args:
        qkv: [S, (Hq + 2 Hkv) D]. Row i belongs to sequence i, and its position is
            context_lens[i] - 1.
        q_weight: [D] weight of the queries' norm.
        k_weight: [D] weight of the keys' norm; both None: no norm.
        eps: of both norms.
        cos_sin: [max_position, D] fp32, cosines then sines.
        kv: the layer's cache; holds this step's tokens afterwards.
        slot_mapping: [S]: where the block table has position context_lens[i] - 1, or -1: nothing
            is stored, as of a row of context length 0.
        metadata: the step's; num_decodes is S.
        scale: multiplies q.k.

    Returns:
        [S, Hq, D] in qkv's dtype; 0 where the context length is 0.
    """
    num_kv_heads, head_dim = kv.k.shape[2:]
    num_q_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    lengths = metadata.context_lens.long()
    positions, slots = (lengths - 1).clamp(min=0), slot_mapping.long()
    q = qk_norm_rope_store(
        qkv, q_weight, k_weight, eps, positions, cos_sin, kv,
        slots.masked_fill(lengths == 0, -1), num_q_heads,
    )  # fmt: skip
    return attention(q, kv, metadata, scale)
