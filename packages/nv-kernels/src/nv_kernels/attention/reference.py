"""Causal attention over paged keys and values, one sequence at a time.

The definition that backends are tested against: float64 inside, without batching. It is slow;
`nv_kernels.attention.torch` computes the same fast in torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nv_kernels.attention.metadata import AttentionMetadata, AttentionSpec
    from nv_kernels.cache.layout import KVCache


def attention(
    q: torch.Tensor,
    kv: KVCache,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend each query to the keys of its own sequence, up to its own position.

    Args:
        q: [T, Hq, D].
        kv: the layer's cache, with this step's tokens stored.
        metadata: which queries and blocks belong to which sequence.
        spec: the layer's.
        sinks: [Hq], if the spec has sinks.

    Returns:
        [T, Hq, D] in q's dtype. Row i of a sequence attends to context_len - query_len + i + 1
        tokens, or to the last `spec.window` of them; rows that belong to no sequence, or to one
        with context_len 0, are 0.
    """
    assert spec.sinks == (sinks is not None)
    out = torch.zeros_like(q)
    block_size = kv.k.shape[1]
    starts = metadata.query_start.tolist()
    for index, context_len in enumerate(metadata.context_lens.tolist()):
        start, end = starts[index], starts[index + 1]
        if context_len == 0 or start == end:
            continue
        blocks = metadata.block_tables[index, : -(-context_len // block_size)].long()
        k = kv.k[blocks].flatten(0, 1)[:context_len].double() * kv.k_scale  # [C, Hkv, D]
        v = kv.v[blocks].flatten(0, 1)[:context_len].double() * kv.v_scale
        out[start:end] = _one(q[start:end].double(), k, v, spec, sinks).to(q.dtype)
    return out


def _one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    num_queries, num_q_heads, _ = q.shape
    context_len, num_kv_heads, _ = k.shape
    group = num_q_heads // num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # [C, Hq, D]
    scores = torch.einsum("qhd,chd->hqc", q, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    last = (torch.arange(num_queries, device=q.device) + context_len - num_queries)[:, None]
    key = torch.arange(context_len, device=q.device)
    hidden = key > last  # [Q, C]
    if spec.window is not None:
        hidden |= key <= last - spec.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, num_queries, 1)
        scores = torch.cat((scores, column), -1)  # [Hq, Q, C + 1]
    weights = scores.softmax(-1)[..., :context_len]
    return torch.einsum("hqc,chd->qhd", weights, v)
