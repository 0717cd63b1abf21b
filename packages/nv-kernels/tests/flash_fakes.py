"""The two FlashAttention packages as their documentation describes them, computed with torch.

They check what the kernels require: int32 tensors, strides, block sizes, host bounds that hold.
Rows that the kernels do not write are NaN.
"""

from types import ModuleType

import torch

FLASH2_PAGE = 256


def attend(q, k_blocks, v_blocks, *, starts, lengths, table, longest, scale, window_size, softcap):
    """Causal attention of packed q [T, Hq, D], aligned to the bottom right, over cache blocks."""
    for index in (starts, lengths, table):
        assert index.dtype == torch.int32
    assert table.stride(-1) == q.stride(-1) == k_blocks.stride(-1) == v_blocks.stride(-1) == 1
    assert starts.shape[0] == lengths.shape[0] + 1 == table.shape[0] + 1
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=q.device)
    block_size = k_blocks.shape[1]
    for row, length in enumerate(lengths.tolist()):
        first, end = starts[row].item(), starts[row + 1].item()
        assert end - first <= longest
        assert length <= block_size * table.shape[1]
        blocks = table[row, : -(-length // block_size)].long()
        k = k_blocks[blocks].flatten(0, 1)[:length].float()
        v = v_blocks[blocks].flatten(0, 1)[:length].float()
        if not length:
            out[first:end] = 0
            continue
        last = torch.arange(end - first) + length - (end - first)
        seen = torch.arange(length) <= last[:, None]
        before, after = window_size
        assert after == 0 or before == after == -1
        if before >= 0:
            seen &= torch.arange(length) >= last[:, None] - before
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,chd->hqc", q[first:end].float(), k) * scale
        if softcap > 0:
            scores = (scores / softcap).tanh() * softcap
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[first:end] = torch.einsum("hqc,chd->qhd", weights, v).to(q.dtype)
    return out


def one_each(q):
    """Cumulative lengths of [N, 1, Hq, D]."""
    assert q.dim() == 4
    assert q.shape[1] == 1
    return torch.arange(q.shape[0] + 1, dtype=torch.int32)


def flash3() -> ModuleType:
    """Stand in for `flash_attn_interface`."""

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        *,
        cache_seqlens,
        page_table,
        cu_seqlens_q=None,
        max_seqlen_q=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
    ):
        assert causal
        packed = cu_seqlens_q is not None
        out = attend(
            q if packed else q[:, 0],
            k_cache,
            v_cache,
            starts=cu_seqlens_q if packed else one_each(q),
            lengths=cache_seqlens,
            table=page_table,
            longest=max_seqlen_q if packed else 1,
            scale=softmax_scale,
            window_size=window_size,
            softcap=softcap,
        )
        return out if packed else out[:, None]

    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def flash2() -> ModuleType:
    """Stand in for `flash_attn`."""

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        *,
        cache_seqlens,
        block_table,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
    ):
        assert causal
        assert k_cache.shape[1] % FLASH2_PAGE == 0
        out = attend(
            q[:, 0],
            k_cache,
            v_cache,
            starts=one_each(q),
            lengths=cache_seqlens,
            table=block_table,
            longest=1,
            scale=softmax_scale,
            window_size=window_size,
            softcap=softcap,
        )
        return out[:, None]

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        block_table=None,
    ):
        assert causal
        assert k.shape[1] % FLASH2_PAGE == 0
        lengths = cu_seqlens_k.diff()
        assert cu_seqlens_k[0] == 0
        assert (lengths <= max_seqlen_k).all()
        return attend(
            q,
            k,
            v,
            starts=cu_seqlens_q,
            lengths=lengths,
            table=block_table,
            longest=max_seqlen_q,
            scale=softmax_scale,
            window_size=window_size,
            softcap=softcap,
        )

    module = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module
