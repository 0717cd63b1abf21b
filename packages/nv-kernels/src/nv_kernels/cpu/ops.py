"""The CPU's kernels as ops: the definitions of `nv_kernels.reference`, by C++ where it was written.

Owns which calls the kernels take: contiguous fp32 or bf16. Everything else goes to the definition.
Each computes a token as if it were alone, so that it is bitwise the same in every batch.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from nv_kernels import reference
from nv_kernels.cpu.calls import kernel
from nv_kernels.cpu.library import library

if TYPE_CHECKING:
    from nv_kernels.kv import KVCache
    from nv_kernels.sampling import SamplingTensors

TILE_DIMS = 5  # of a weight in tiles: [N / 16, K / 32, 16, 16, 2]
FEW_ROWS = 4  # of a bf16 product that is faster by vectors than by torch, which unpacks the weight


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Lay a weight out for `linear`: in fp32 as it is stored, in bf16 by tiles where there are any.

    Args:
        weight: [N, K].

    Returns:
        The weight for `linear`: [N, K], or [N / 16, K / 32, 16, 16, 2], tiles of 16 outputs by 32
        columns whose rows hold two columns of each output.
    """
    if weight.dtype == torch.float32 and kernel("linear", weight.dtype):
        return weight.contiguous()
    outputs, columns = weight.shape
    if weight.dtype != torch.bfloat16 or outputs % 16 or columns % 32 or not has_tiles():
        return reference.pack_weight(weight)
    by_tile = weight.reshape(outputs // 16, 16, columns // 32, 16, 2)
    return by_tile.permute(0, 2, 3, 1, 4).contiguous()


def is_in_tiles(weight: torch.Tensor) -> bool:
    """Whether a weight was laid out by tiles."""
    return weight.dim() == TILE_DIMS


@cache
def has_tiles() -> bool:
    """Whether this processor multiplies tiles of bf16 (Intel AMX), and the system lets it."""
    built = library()
    return built is not None and bool(built.may_use_tiles_bf16())


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply each row by the transposed weight.

    Args:
        x: [T, K].
        weight: [N, K], in x's dtype, or what `pack_weight` made of it.
        bias: [N] or None.

    Returns:
        [T, N] in x's dtype, accumulated in fp32; in fp32 no row depends on the others.
    """
    invariant = x.dtype == torch.float32 or is_in_tiles(weight)
    if invariant or x.shape[0] <= FEW_ROWS:
        product = _product(x, weight, bias)
        if product is not None:
            return product
    return reference.linear(x, weight, bias)


def batch_invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply each row by the transposed weight, bitwise the same whatever the other rows are.

    Args:
        x: [T, K].
        weight: [N, K], in x's dtype, or what `pack_weight` made of it.
        bias: [N] or None.

    Returns:
        [T, N] in x's dtype, accumulated in fp32.
    """
    if x.dtype == torch.float32 or is_in_tiles(weight):
        product = _product(x, weight, bias)
        if product is not None:
            return product
    return reference.batch_invariant_linear(x, weight, bias)


def batch_invariant_partials(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply as `batch_invariant_linear`, for a consumer that sums partials: here there are none.

    Args:
        x: [T, K].
        weight: [N, K], in x's dtype, or what `pack_weight` made of it.
        bias: [N] or None.

    Returns:
        [T, N] in x's dtype.
    """
    return batch_invariant_linear(x, weight, bias)


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """Multiply by the kernel, or None where it does not take this weight."""
    if weight.is_mkldnn or weight.dtype != x.dtype or not weight.is_contiguous():
        return None
    call = kernel("linear_tiles" if is_in_tiles(weight) else "linear", x.dtype)
    if call is None:
        return None
    x = x.contiguous()
    num_outputs = weight.shape[0] * (16 if is_in_tiles(weight) else 1)
    out = x.new_empty(x.shape[0], num_outputs)  # [T, N]
    at_bias = None if bias is None else bias.data_ptr()
    sizes = (*out.shape, x.shape[1], torch.get_num_threads())
    call(x.data_ptr(), weight.data_ptr(), at_bias, out.data_ptr(), *sizes)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each vector by its root mean square and scale it (Zhang and Sennrich, 2019).

    Args:
        x: [..., E].
        weight: [E], in x's dtype.
        eps: added to the mean square.

    Returns:
        [..., E] in x's dtype.
    """
    if weight.dim() != 1 or kernel("add_rms_norm", x.dtype) is None:
        return reference.rms_norm(x, weight, eps)
    return add_rms_norm(x.reshape(-1, x.shape[-1]), None, weight, eps)[0].view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a layer's output to the residual stream and normalise the sum.

    Args:
        x: [T, E], or [P, T, E] partials, which are summed first.
        residual: [T, E], or None where x starts the stream. Left as it is.
        weight: [E].
        eps: added to the mean square.

    Returns:
        The normalised sum [T, E] and the sum itself [T, E] (x where residual is None).
    """
    call = kernel("add_rms_norm", x.dtype)
    if call is None or x.dim() != 2 or weight.dtype != x.dtype:
        return reference.add_rms_norm(x, residual, weight, eps)
    x = x.contiguous()
    normed, total, at_residual = torch.empty_like(x), x, None
    if residual is not None:
        residual, total = residual.contiguous(), torch.empty_like(x)
        at_residual = residual.data_ptr()
    outputs = (normed.data_ptr(), total.data_ptr())
    sizes = (*x.shape, torch.get_num_threads())
    call(x.data_ptr(), at_residual, weight.contiguous().data_ptr(), eps, *outputs, *sizes)
    return normed, total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate the second half of each row with the SiLU of the first (Shazeer, 2020).

    Args:
        x: [T, 2F], gate then up. The SiLU is rounded to x's dtype before it multiplies.

    Returns:
        [T, F] in x's dtype.
    """
    call = kernel("silu_and_mul", x.dtype)
    if call is None or x.dim() != 2:
        return reference.silu_and_mul(x)
    x = x.contiguous()
    out = x.new_empty(x.shape[0], x.shape[1] // 2)  # [T, F]
    call(x.data_ptr(), out.data_ptr(), *out.shape, torch.get_num_threads())
    return out


def batch_invariant_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate as `silu_and_mul`, which here never depends on the other rows.

    Args:
        x: [T, 2F].

    Returns:
        [T, F] in x's dtype.
    """
    if kernel("silu_and_mul", x.dtype) is None or x.dim() != 2:
        return reference.batch_invariant_silu_and_mul(x)
    return silu_and_mul(x)


def apply_rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head's two halves by the token's angles, bitwise as `qk_norm_rope_store` does.

    Args:
        x: [T, H, D], D even.
        positions: [T] int32 or int64.
        cos_sin: [max_position, D] fp32, cosines (D/2) then sines (D/2).

    Returns:
        [T, H, D] in x's dtype.
    """
    call = kernel("apply_rope", x.dtype)
    if call is None:
        return reference.apply_rope(x, positions, cos_sin)
    x, positions = x.contiguous(), positions.long()
    out = torch.empty_like(x)
    inputs = (x.data_ptr(), positions.data_ptr(), cos_sin.data_ptr())
    call(*inputs, out.data_ptr(), *x.shape, torch.get_num_threads())
    return out


def qk_norm_rope_store(  # noqa: PLR0917  the projection's own order
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv: KVCache,
    slot_mapping: torch.Tensor,
    num_q_heads: int,
) -> torch.Tensor:
    """Turn a fused projection into rotated queries and stored keys and values.

    Args:
        qkv: [T, (Hq + 2 Hkv) D], queries then keys then values. Left as it is.
        q_weight: [D] weight of the queries' norm.
        k_weight: [D] weight of the keys' norm; both None: no norm.
        eps: of both norms.
        positions: [T] int32 or int64.
        cos_sin: [max_position, D] fp32, cosines (D/2) then sines (D/2).
        kv: the layer's cache; gives Hkv and D.
        slot_mapping: [T]; -1: not stored.
        num_q_heads: Hq.

    Returns:
        Queries [T, Hq, D] in qkv's dtype.
    """
    call = kernel("qk_norm_rope_store", qkv.dtype)
    num_kv_heads, dim = kv.k.shape[2:]
    if call is None or kv.k.dtype != qkv.dtype or qkv.dim() != 2 or kv.k_scale != 1.0:
        return reference.qk_norm_rope_store(
            qkv, q_weight, k_weight, eps, positions, cos_sin, kv, slot_mapping, num_q_heads
        )
    qkv, positions, slots = qkv.contiguous(), positions.long(), slot_mapping.long()
    q = qkv.new_empty(qkv.shape[0], num_q_heads, dim)
    at_weights = [None if weight is None else weight.data_ptr() for weight in (q_weight, k_weight)]
    call(
        *(qkv.data_ptr(), *at_weights, eps, positions.data_ptr(), cos_sin.data_ptr()),
        *(*kv.arguments, slots.data_ptr(), q.data_ptr()),
        *(qkv.shape[0], num_q_heads, num_kv_heads, dim, torch.get_num_threads()),
    )
    return q


def sample(logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """Draw a token for each row; where all are greedy, by one pass over the logits.

    Args:
        logits: [R, V] fp32, bf16 or fp16.
        sampling: parameters of the R rows.

    Returns:
        Token ids [R] int64.
    """
    call = kernel("greedy", logits.dtype)
    if call is None or not sampling.all_greedy:
        return reference.sample(logits, sampling)
    logits = logits.contiguous()
    ids = logits.new_empty(logits.shape[0], dtype=torch.int64)  # [R]
    call(logits.data_ptr(), ids.data_ptr(), *logits.shape, torch.get_num_threads())
    return ids
