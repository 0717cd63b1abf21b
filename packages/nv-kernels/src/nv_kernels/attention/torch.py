"""Attention over paged keys and values with torch's own operations: the CPU's hot path.

A layer needs one gather of keys, one of values and one scaled_dot_product_attention per group of
sequences. There is no loop over tokens. torch's function has no softcap and no sinks: layers with
them are computed with their scores in fp32 in memory.

Keys and values are stored token by token ("NHD"): a gathered token is one copy of Hkv * D elements,
and consecutive blocks are one slice that needs no copy. On two AVX-512 cores "HND" was not faster
for any measured shape. The queries of a kv head are packed as rows of one matrix, which was faster
than `enable_gqa` except for small bf16 groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from nv_kernels.attention.grouping import MAX_TILE_QUERIES, Grouping, group
from nv_kernels.cache.layout import KVLayout, as_bytes

if TYPE_CHECKING:
    from collections.abc import Collection

    from nv_kernels.attention.grouping import DecodeGroup, PromptChunk
    from nv_kernels.attention.metadata import AttentionMetadata, AttentionShape, AttentionSpec
    from nv_kernels.cache.layout import KVCache


@dataclass(frozen=True)
class TorchAttention:
    """The `torch` backend, on any device. On a GPU its plan waits for the device.

    Attributes:
        shape: the shape of attention that it was built for.
        reason: why it was picked.
        name: "torch".
    """

    is_capturable: ClassVar[bool] = False
    compiles: ClassVar[bool] = False

    shape: AttentionShape
    reason: str
    name: str = "torch"

    def kv_layout(self, num_blocks: int, dtype: torch.dtype) -> KVLayout:
        """Store a token's heads side by side."""
        shape = self.shape
        return KVLayout(
            num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype, "NHD"
        )

    def refusal(self, spec: AttentionSpec) -> None:
        """It computes every feature."""

    def plan(
        self, metadata: AttentionMetadata, windows: Collection[int | None] = (None,)
    ) -> dict[int | None, Grouping]:
        """Group the step's sequences, once for all layers of a window."""
        size, dtype = self.shape.block_size, self.shape.dtype
        return {window: group(metadata, size, dtype, window) for window in windows}

    def attend(
        self,
        q: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        plan: Grouping,
        spec: AttentionSpec,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend each query to the keys of its own sequence, up to its own position.

        Args:
            q: [T, Hq, D].
            kv: a cache of this backend's layout.
            metadata: the step's.
            plan: what `plan` returned for it, at the spec's window.
            spec: how the layer attends.
            sinks: [Hq], if the spec has sinks.

        Returns:
            [T, Hq, D] in q's dtype; rows without keys are 0.
        """
        assert plan.window == spec.window
        assert spec.sinks == (sinks is not None)
        spec = replace(spec, scale=spec.scale * kv.k_scale)
        grouped = q.contiguous() if plan.rows is None else q.index_select(0, plan.rows)
        if (
            grouped.data_ptr() % 16
        ):  # a CUDA kernel assumes 16-byte alignment, and torch does not check it
            grouped = grouped.clone()  # [Q, Hq, D]
        outs = [_decode(grouped[part.rows], part, kv, spec, sinks) for part in plan.decodes]
        outs += [_chunk(grouped[part.rows], part, kv, spec, sinks) for part in plan.chunks]
        if not outs:
            return torch.zeros_like(q, memory_format=torch.contiguous_format)
        seen = outs[0] if len(outs) == 1 else torch.cat(outs)
        if plan.rows is None and seen.shape[0] == q.shape[0]:
            return seen
        rows = slice(seen.shape[0]) if plan.rows is None else plan.rows
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        out[rows] = seen
        return out


def _decode(
    q: torch.Tensor,
    part: DecodeGroup,
    kv: KVCache,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend N sequences with one query each: q [N, Hq, D] -> [N, Hq, D]."""
    num_kv_heads, head_dim = kv.k.shape[2:]
    padded = (q.shape[0], part.num_tokens, num_kv_heads, head_dim)
    k = _take(kv.k, part.slots, q.dtype).view(padded).transpose(1, 2)  # [N, Hkv, C, D]
    v = _take(kv.v, part.slots, q.dtype).view(padded).transpose(1, 2)
    packed = q.view(q.shape[0], num_kv_heads, -1, head_dim)  # [N, Hkv, Hq / Hkv, D]
    if spec.softcap is None and sinks is None:
        out = scaled_dot_product_attention(packed, k, v, attn_mask=part.mask, scale=spec.scale)
    else:
        logits = None if sinks is None else sinks.view(1, num_kv_heads, -1, 1)
        out = _capped(packed, k, v, part.mask, spec, sinks=logits)
    return _scaled(out.reshape(q.shape), kv.v_scale)


def _chunk(
    q: torch.Tensor,
    part: PromptChunk,
    kv: KVCache,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend the last queries of one sequence, a tile at a time: q [Q, Hq, D] -> [Q, Hq, D]."""
    heads = q.transpose(0, 1)[None]  # [1, Hq, Q, D]
    k = _take(kv.k, part.slots, q.dtype).transpose(0, 1)[None]  # [1, Hkv, C, D]
    v = _take(kv.v, part.slots, q.dtype).transpose(0, 1)[None]
    num_cached = k.shape[2] - q.shape[0]
    logits = None if sinks is None else sinks.view(1, -1, 1, 1)
    outs = []
    for start in range(0, q.shape[0], MAX_TILE_QUERIES):
        size = min(MAX_TILE_QUERIES, q.shape[0] - start)
        seen = num_cached + start + size
        first = 0 if spec.window is None else max(0, seen - (size + spec.window - 1))
        tile, keys = heads[:, :, start : start + size], slice(first, seen)
        mask = part.mask.of_last(size, seen - first)
        if spec.softcap is None and sinks is None:
            out = scaled_dot_product_attention(
                tile,
                k[:, :, keys],
                v[:, :, keys],
                attn_mask=mask,
                scale=spec.scale,
                enable_gqa=True,
            )
        else:
            out = _capped(tile, k[:, :, keys], v[:, :, keys], mask, spec, sinks=logits)
        outs.append(out[0].transpose(0, 1))  # [size, Hq, D]
    return _scaled(torch.cat(outs), kv.v_scale)


def _capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    spec: AttentionSpec,
    *,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a softcap or sinks: q [N, H, Q, D], k and v [N, Hkv, C, D] -> q's shape.

    H is a multiple of Hkv; mask and sinks broadcast to [N, H, Q, C] and [N, H, Q, 1].
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows = q.to(dtype).reshape(q.shape[0], k.shape[1], -1, q.shape[3])  # [N, Hkv, H / Hkv * Q, D]
    scores = (rows @ k.to(dtype).transpose(2, 3)).view(*q.shape[:3], -1) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(dtype).expand(*q.shape[:3], 1)), -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    out: torch.Tensor = weights.reshape(*rows.shape[:3], -1) @ v.to(dtype)
    return out.view(q.shape).to(q.dtype)


def _take(cache: torch.Tensor, slots: torch.Tensor | slice, dtype: torch.dtype) -> torch.Tensor:
    """Read slots of [num_blocks, block_size, Hkv, D] as [C, Hkv, D] of a dtype."""
    tokens = cache.view(-1, *cache.shape[2:])  # raises for another layout instead of copying
    if isinstance(slots, slice):
        return tokens[slots].to(dtype)
    return as_bytes(tokens).index_select(0, slots).view(cache.dtype).to(dtype)


def _scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x if scale == 1.0 else x * scale
