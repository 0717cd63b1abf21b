"""Copies between blocks of the paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nv_kernels.op import op

if TYPE_CHECKING:
    import torch

    from nv_kernels.cache.layout import KVCache


@op(triton="nv_kernels.cache.triton_copy")
def copy_blocks(
    kv: KVCache, sources: torch.Tensor, destinations: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    """Copy the first tokens of some blocks into others.

    Args:
        kv: the cache.
        sources: [N] int32 or int64 block numbers.
        destinations: [N] block numbers, none of them also a source, none twice.
        num_tokens: [N] tokens to copy, 0 to block_size.
    """
    for source, destination, count in zip(
        sources.tolist(), destinations.tolist(), num_tokens.tolist(), strict=True
    ):
        kv.k[destination, :count].copy_(kv.k[source, :count])
        kv.v[destination, :count].copy_(kv.v[source, :count])
