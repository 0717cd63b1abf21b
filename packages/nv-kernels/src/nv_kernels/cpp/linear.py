"""Products by a weight in C++, of contiguous fp32 or bf16; the definitions for everything else.

Owns which calls the kernels take, and the layout of a weight in tiles. A token is computed as if it
were alone, so that it is bitwise the same in every batch.
"""

from __future__ import annotations

from functools import cache

import torch

from nv_kernels.cpp.calls import kernel
from nv_kernels.cpp.library import library
from nv_kernels.linear import definitions

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
        return definitions.pack_weight.definition(weight)
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
    return definitions.linear.definition(x, weight, bias)


def batch_invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply; see `nv_kernels.reference.batch_invariant_linear`."""
    if x.dtype == torch.float32 or is_in_tiles(weight):
        product = _product(x, weight, bias)
        if product is not None:
            return product
    return definitions.batch_invariant_linear.definition(x, weight, bias)


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
    return definitions.linear.definition(hidden, weight).float() if product is None else product


def batch_invariant_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply; see `nv_kernels.reference.batch_invariant_logits`, and `logits` on rounding."""
    product = _product(hidden, weight, None, torch.float32)
    if product is None:
        return definitions.batch_invariant_linear.definition(hidden, weight).float()
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
