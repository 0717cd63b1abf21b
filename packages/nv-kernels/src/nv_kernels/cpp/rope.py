"""Rotation, alone and with norm and cache write, in C++; the definitions for everything else.

The kernels take contiguous fp32 or bf16, and for the write a cache of the same dtype. Each token is
computed alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.cache import rope as definitions
from nv_kernels.cpp.calls import has_form, kernel

if TYPE_CHECKING:
    from nv_kernels.cache.layout import KVCache


INTEGERS = {torch.int32, torch.int64}


def apply_rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate, bitwise as `qk_norm_rope_store` does; see `nv_kernels.reference.apply_rope`."""
    call = kernel("apply_rope", x.dtype)
    fits = x.dim() == 3 and _takes(positions, cos_sin, x.shape[0], x.shape[2])
    if call is None or not fits:
        return definitions.apply_rope.definition(x, positions, cos_sin)
    x, positions, cos_sin = x.contiguous(), positions.long().contiguous(), cos_sin.contiguous()
    out = torch.empty_like(x)
    inputs = (x.data_ptr(), positions.data_ptr(), cos_sin.data_ptr())
    if not call(*inputs, out.data_ptr(), *x.shape, *cos_sin.shape, torch.get_num_threads()):
        return definitions.apply_rope.definition(x, positions, cos_sin)  # it raises
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
    define = definitions.qk_norm_rope_store.definition
    given = (
        *(qkv, q_weight, k_weight, eps, positions, cos_sin),
        *(kv, slot_mapping, num_q_heads, dtype),
    )
    call = kernel("qk_norm_rope_store", qkv.dtype)
    num_kv_heads, dim = kv.k.shape[2:]
    weights = [weight for weight in (q_weight, k_weight) if weight is not None]
    width = (num_q_heads + 2 * num_kv_heads) * dim
    fits = (
        has_form(qkv, (len(qkv), width), kv.k.dtype)
        and kv.v.dtype == kv.k.dtype
        and all(has_form(weight, (dim,), qkv.dtype) for weight in weights)
        and len(weights) != 1
        and _takes(positions, cos_sin, len(qkv), dim)
        and slot_mapping.shape == positions.shape
    )
    if call is None or not fits or kv.k_scale != 1.0:
        return define(*given)
    q = qkv.new_empty(len(qkv), num_q_heads, dim)
    tensors = (qkv, q_weight, k_weight, positions.long(), cos_sin, slot_mapping.long(), q)
    held = [None if each is None else each.contiguous() for each in tensors]
    at = [None if each is None else each.data_ptr() for each in held]
    is_done = call(
        *(*at[:3], eps, *at[3:5], *kv.arguments, *at[5:]),
        *(len(qkv), num_q_heads, num_kv_heads, dim, kv.k.shape[0] * kv.k.shape[1]),
        *((0, 0) if cos_sin is None else cos_sin.shape),
        torch.get_num_threads(),
    )
    return q if is_done else define(*given)  # it raises


def _takes(
    positions: torch.Tensor, cos_sin: torch.Tensor | None, num_tokens: int, dim: int
) -> bool:
    """Whether the kernels can read T positions and a table for heads of D elements."""
    if positions.shape != (num_tokens,) or positions.dtype not in INTEGERS:
        return False
    if cos_sin is None:
        return True
    is_table = cos_sin.dim() == 2 and cos_sin.dtype == torch.float32
    return is_table and cos_sin.shape[1] <= dim and cos_sin.shape[1] % 2 == 0
