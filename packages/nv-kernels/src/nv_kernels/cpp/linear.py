"""Products by a weight in C++, of contiguous fp32 or bf16; the definitions for everything else.

Owns the layout of a weight in tiles. Each token is computed alone, so that its bits do not depend
on the batch.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from nv_kernels.cpp.calls import has_form, kernel
from nv_kernels.cpp.library import library
from nv_kernels.linear import definitions

if TYPE_CHECKING:
    from collections.abc import Callable

TILE_DIMS = 5  # dimensions of a weight in tiles: [N / 16, K / 32, 16, 16, 2]
FEW_ROWS = 4  # rows up to which a bf16 product by vectors beats torch; measured at 1 to 256


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Lay a weight out for `linear`: fp32 as stored, bf16 in tiles if the processor reads them.

    Args:
        weight: [N, K].

    Returns:
        The weight for `linear`: [N, K], or [N / 16, K / 32, 16, 16, 2]: tiles of 16 outputs by 32
        columns; a row of a tile has two columns of each output.
    """
    if weight.dtype == torch.float32 and kernel("linear", weight.dtype, weight.dtype):
        return weight.contiguous()
    outputs, columns = weight.shape
    if weight.dtype != torch.bfloat16 or outputs % 16 or columns % 32 or not has_tiles():
        return definitions.pack_weight.definition(weight)
    return tiled(weight)


def tiled(weight: torch.Tensor) -> torch.Tensor:
    """Lay [N, K] out in tiles, [N / 16, K / 32, 16, 16, 2], as `pack_weight` describes them."""
    outputs, columns = weight.shape
    by_tile = weight.reshape(outputs // 16, 16, columns // 32, 16, 2)
    return by_tile.permute(0, 2, 3, 1, 4).contiguous()


def pack_head(weight: torch.Tensor) -> torch.Tensor:
    """Lay the head's weight out for `logits`: in tiles if the processor has AMX, else as stored.

    As it is stored, a head that is the embedding needs no second copy, and few rows take as long.

    Args:
        weight: [V, E].

    Returns:
        The weight for `logits`; oneDNN packs it only if no kernel of ours supports it.
    """
    can_read = kernel("linear", weight.dtype, torch.float32) is not None
    return weight.contiguous() if can_read and not has_amx() else pack_weight(weight)


def is_in_tiles(weight: torch.Tensor) -> bool:
    """Whether a weight is in tiles."""
    return weight.dim() == TILE_DIMS


@cache
def has_tiles() -> bool:
    """Whether this processor multiplies pairs of bf16: by Intel AMX, or by AVX512-BF16."""
    built = library()
    return built is not None and bool(built.has_tiles_bf16())


@cache
def has_amx() -> bool:
    """Whether this processor has matrix tiles (Intel AMX), and the system permits their use."""
    built = library()
    return built is not None and bool(built.has_amx_bf16())


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply; see `nv_kernels.reference.linear`. In fp32 and in tiles rows are independent."""
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
    """Multiply; see `nv_kernels.reference.batch_invariant_partials`. It never returns partials."""
    return batch_invariant_linear(x, weight, bias)


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply in fp32; see `nv_kernels.reference.logits`. With the kernels rows are independent.

    Without them bf16 and fp16 logits are rounded: torch's products on a CPU return their input's
    dtype, and converting the weight to fp32 at each step doubles a small model's time.
    """
    product = _product(hidden, weight, None, torch.float32)
    return definitions.linear.definition(hidden, weight).float() if product is None else product


def batch_invariant_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply; see `nv_kernels.reference.batch_invariant_logits`, and `logits` about rounding."""
    product = _product(hidden, weight, None, torch.float32)
    if product is None:
        return definitions.batch_invariant_linear.definition(hidden, weight).float()
    return product


def fp32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """Multiply [T, K] by a plain weight [N, K] of the same dtype into fp32, each row alone.

    None if the kernels do not take these tensors.
    """
    return _product(x, weight, None, torch.float32)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """Multiply by the kernel into a dtype, x's by default; None if it does not take these."""
    if weight.is_mkldnn or weight.dim() not in {2, TILE_DIMS}:
        return None
    if weight.dtype != x.dtype or not weight.is_contiguous():
        return None
    dtype = dtype or x.dtype
    call = kernel(name_of(weight), x.dtype, dtype)
    if call is None:
        return None
    num_outputs, num_columns = sizes_of(weight)
    if not fits(x, bias, num_outputs, num_columns):
        return None
    return multiplied(call, x, weight.data_ptr(), num_outputs, bias=bias, dtype=dtype)


def sizes_of(weight: torch.Tensor) -> tuple[int, int]:
    """Return N and K of a weight, [N, K] or in tiles."""
    outputs, columns = weight.shape[:2]
    return (outputs * 16, columns * 32) if is_in_tiles(weight) else (outputs, columns)


def fits(x: torch.Tensor, bias: torch.Tensor | None, num_outputs: int, num_columns: int) -> bool:
    """Whether x is [T, K] for a weight [N, K], and a bias [N] in x's dtype."""
    is_rows = x.dim() == 2 and x.shape[1] == num_columns
    return is_rows and has_form(bias, (num_outputs,), x.dtype)


def name_of(weight: torch.Tensor) -> str:
    """Name the kernel for a weight's layout."""
    return "linear_tiles" if is_in_tiles(weight) else "linear"


def multiplied(
    call: Callable[..., None],
    x: torch.Tensor,
    at_weight: int,
    num_outputs: int,
    *,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Run a kernel: x [T, K] times the weight at an address -> [T, num_outputs]."""
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    out = x.new_empty(x.shape[0], num_outputs, dtype=dtype)
    at_bias = None if bias is None else bias.data_ptr()
    sizes = (*out.shape, x.shape[1], torch.get_num_threads())
    call(x.data_ptr(), at_weight, at_bias, out.data_ptr(), *sizes)
    return out
