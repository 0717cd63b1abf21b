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
FEW_ROWS = 4  # of a bf16 product by vectors; measured beside torch at 1 to 256


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Lay a weight out for `linear`: in fp32 as it is stored, in bf16 by tiles where there are any.

    Args:
        weight: [N, K].

    Returns:
        The weight for `linear`: [N, K], or [N / 16, K / 32, 16, 16, 2], tiles of 16 outputs by 32
        columns whose rows hold two columns of each output.
    """
    if weight.dtype == torch.float32 and kernel("linear", weight.dtype, weight.dtype):
        return weight.contiguous()
    outputs, columns = weight.shape
    if weight.dtype != torch.bfloat16 or outputs % 16 or columns % 32 or not has_tiles():
        return reference.pack_weight(weight)
    by_tile = weight.reshape(outputs // 16, 16, columns // 32, 16, 2)
    return by_tile.permute(0, 2, 3, 1, 4).contiguous()


def pack_head(weight: torch.Tensor) -> torch.Tensor:
    """Lay the head's weight out for `logits`: by tiles where there are any, else as it is stored.

    Args:
        weight: [V, E].

    Returns:
        The weight for `logits`; what oneDNN packs only where no kernel reads the weight.
    """
    packed = pack_weight(weight)
    can_read = kernel("linear", weight.dtype, torch.float32) is not None
    return weight.contiguous() if packed.is_mkldnn and can_read else packed


def is_in_tiles(weight: torch.Tensor) -> bool:
    """Whether a weight was laid out by tiles."""
    return weight.dim() == TILE_DIMS


@cache
def has_tiles() -> bool:
    """Whether this processor multiplies tiles of bf16 (Intel AMX), and the system lets it."""
    built = library()
    return built is not None and bool(built.may_use_tiles_bf16())


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply; see `nv_kernels.reference.linear`. In fp32 and by tiles rows are independent."""
    invariant = x.dtype == torch.float32 or is_in_tiles(weight)
    if invariant or x.shape[0] <= FEW_ROWS:
        product = _product(x, weight, bias)
        if product is not None:
            return product
    return reference.linear(x, weight, bias)


def batch_invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply; see `nv_kernels.reference.batch_invariant_linear`."""
    if x.dtype == torch.float32 or is_in_tiles(weight):
        product = _product(x, weight, bias)
        if product is not None:
            return product
    return reference.batch_invariant_linear(x, weight, bias)


def batch_invariant_partials(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply; see `nv_kernels.reference.batch_invariant_partials`. There are no partials here."""
    return batch_invariant_linear(x, weight, bias)


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply in fp32; see `nv_kernels.reference.logits`. By the kernels rows are independent.

    Without them bf16 and fp16 are rounded: torch's products on a CPU give what goes in, and a
    weight made fp32 at each step takes a small model twice the time.
    """
    product = _product(hidden, weight, None, torch.float32)
    return reference.linear(hidden, weight).float() if product is None else product


def batch_invariant_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply; see `nv_kernels.reference.batch_invariant_logits`, and `logits` on rounding."""
    product = _product(hidden, weight, None, torch.float32)
    if product is None:
        return reference.batch_invariant_linear(hidden, weight).float()
    return product


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """Multiply by the kernel into a dtype, x's by default; None where there is no kernel."""
    if weight.is_mkldnn or weight.dtype != x.dtype or not weight.is_contiguous():
        return None
    dtype = dtype or x.dtype
    call = kernel("linear_tiles" if is_in_tiles(weight) else "linear", x.dtype, dtype)
    if call is None:
        return None
    x = x.contiguous()
    num_outputs = weight.shape[0] * (16 if is_in_tiles(weight) else 1)
    out = x.new_empty(x.shape[0], num_outputs, dtype=dtype)  # [T, N]
    at_bias = None if bias is None else bias.data_ptr()
    sizes = (*out.shape, x.shape[1], torch.get_num_threads())
    call(x.data_ptr(), weight.data_ptr(), at_bias, out.data_ptr(), *sizes)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise; see `nv_kernels.reference.rms_norm`."""
    if weight.dim() != 1 or kernel("add_rms_norm", x.dtype) is None:
        return reference.rms_norm(x, weight, eps)
    return add_rms_norm(x.reshape(-1, x.shape[-1]), None, weight, eps)[0].view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add and normalise; see `nv_kernels.reference.add_rms_norm`."""
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
    """Gate; see `nv_kernels.reference.silu_and_mul`."""
    call = kernel("silu_and_mul", x.dtype)
    if call is None or x.dim() != 2:
        return reference.silu_and_mul(x)
    x = x.contiguous()
    out = x.new_empty(x.shape[0], x.shape[1] // 2)  # [T, F]
    call(x.data_ptr(), out.data_ptr(), *out.shape, torch.get_num_threads())
    return out


def batch_invariant_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate; here a row never depends on the others."""
    if kernel("silu_and_mul", x.dtype) is None or x.dim() != 2:
        return reference.batch_invariant_silu_and_mul(x)
    return silu_and_mul(x)


def apply_rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate, bitwise as `qk_norm_rope_store` does; see `nv_kernels.reference.apply_rope`."""
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
    """Norm, rotate and store; see `nv_kernels.reference.qk_norm_rope_store`."""
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
    """Draw; see `nv_kernels.reference.sample`. All-greedy rows take one pass over the logits."""
    call = kernel("greedy", logits.dtype)
    if call is None or not sampling.all_greedy:
        return reference.sample(logits, sampling)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, width = logits.shape
    ids = logits.new_empty(rows, dtype=torch.int64)  # [R]
    num_ids = width if sampling.num_ids is None else sampling.num_ids
    sizes = (rows, logits.stride(0), num_ids)
    call(logits.data_ptr(), ids.data_ptr(), *sizes, torch.get_num_threads())
    return ids
