"""Rotation, alone and with norm and cache write, in C++; the definitions for everything else.

The kernels take contiguous fp32 or bf16, and for the write a cache of the same dtype. Each token is
computed alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.cache import rope as definitions
from nv_kernels.cpp.calls import kernel

if TYPE_CHECKING:
    from nv_kernels.cache.layout import KVCache


def apply_rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate, bitwise as `qk_norm_rope_store` does; see `nv_kernels.reference.apply_rope`."""
    call = kernel("apply_rope", x.dtype)
    if call is None:
        return definitions.apply_rope.definition(x, positions, cos_sin)
    x, positions = x.contiguous(), positions.long()
    out = torch.empty_like(x)
    inputs = (x.data_ptr(), positions.data_ptr(), cos_sin.data_ptr())
    call(*inputs, out.data_ptr(), *x.shape, cos_sin.shape[1], torch.get_num_threads())
    return out


def qk_norm_rope_store(  # noqa: PLR0917  the projection's own order
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    kv: KVCache,
    slot_mapping: torch.Tensor,
    num_q_heads: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Norm, rotate and store; see `nv_kernels.reference.qk_norm_rope_store`."""
    call = kernel("qk_norm_rope_store", qkv.dtype)
    num_kv_heads, dim = kv.k.shape[2:]
    weights = [weight for weight in (q_weight, k_weight) if weight is not None]
    dtypes = {qkv.dtype, kv.k.dtype, *(weight.dtype for weight in weights)}
    if call is None or len(dtypes) > 1 or qkv.dim() != 2 or kv.k_scale != 1.0:
        return definitions.qk_norm_rope_store.definition(
            qkv, q_weight, k_weight, eps, positions, cos_sin, kv, slot_mapping, num_q_heads, dtype
        )
    qkv, positions, slots = qkv.contiguous(), positions.long(), slot_mapping.long()
    q = qkv.new_empty(qkv.shape[0], num_q_heads, dim)
    at_weights = [None if weight is None else weight.data_ptr() for weight in (q_weight, k_weight)]
    call(
        *(qkv.data_ptr(), *at_weights, eps, positions.data_ptr()),
        None if cos_sin is None else cos_sin.data_ptr(),
        *(*kv.arguments, slots.data_ptr(), q.data_ptr()),
        *(qkv.shape[0], num_q_heads, num_kv_heads, dim),
        *(0 if cos_sin is None else cos_sin.shape[1], torch.get_num_threads()),
    )
    return q
