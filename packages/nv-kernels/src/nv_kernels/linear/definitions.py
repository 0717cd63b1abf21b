"""Weights applied to tokens: the matrix product and the table look-up.

Both in plain torch, and the layout of a weight that a CPU multiplies fastest.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

from nv_kernels.linear.heights import TALL, agreeing_heights, multiply_in_blocks
from nv_kernels.op import op

PACKED_ROWS = 16  # tokens that a packed weight is optimised for; measured at 1 to 1,024


@op(cpp="nv_kernels.cpp.linear")
def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Convert a weight to the layout that `linear` reads fastest, when a model is loaded.

    On a CPU with oneDNN's bf16 this is its blocked layout, which no other op reads. In fp32 it is
    column-major: the library would otherwise transpose it at each call with more than one row,
    which takes as long as the product at 2 to 16 rows. On other devices the weight is returned
    unchanged.

    Args:
        weight: [N, K].

    Returns:
        The weight for `linear`, the same shape.
    """
    if weight.device.type != "cpu":
        return weight
    if weight.dtype == torch.float32:
        return weight if weight.t().is_contiguous() else weight.t().contiguous().t()
    if weight.dtype != torch.bfloat16 or not _has_packing():
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    return packed


def _has_packing() -> bool:
    """True if this torch and this processor multiply packed bf16 weights."""
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


@op(triton="nv_kernels.linear.triton.product", cpp="nv_kernels.cpp.linear")
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply each row by the transposed weight.

    On a CPU in fp32 a row's result does not depend on the other rows (`batch_invariant_linear`).

    Args:
        x: [T, K].
        weight: [N, K], in x's dtype, or the result of `pack_weight`.
        bias: [N] or None.

    Returns:
        [T, N] in x's dtype, accumulated in fp32.
    """
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return batch_invariant_linear.definition(x, weight, bias)
    if x.shape[0] == 1 and bias is None and not weight.is_mkldnn and not x.is_cuda:
        # On a CPU torch reads the weight 1.4 to 1.9 times faster for a vector than for one row.
        return torch.mv(weight, x[0])[None]
    return _product(x, weight, bias)


@op(triton="nv_kernels.linear.triton.batch_invariant", cpp="nv_kernels.cpp.linear")
def batch_invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply each row by the transposed weight, bitwise the same whatever the other rows are.

    Args:
        x: [T, K].
        weight: [N, K], in x's dtype, or the result of `pack_weight`.
        bias: [N] or None.

    Returns:
        [T, N] in x's dtype, accumulated in fp32.
    """
    heights: tuple[int, ...] = (TALL,)
    if x.dtype == torch.float32:
        by_columns = weight.t().is_contiguous()
        heights = _heights(weight.shape[0], weight.shape[1], by_columns, torch.get_num_threads())

    def product(block: torch.Tensor, out: torch.Tensor) -> None:
        if weight.is_mkldnn:
            out.copy_(_product(block, weight, bias))
        else:
            _product_into(block, weight, bias, out)

    return multiply_in_blocks(x, weight.shape[0], product, heights)


@op(triton="nv_kernels.linear.triton.batch_invariant", cpp="nv_kernels.cpp.linear")
def batch_invariant_partials(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply as `batch_invariant_linear`, for a consumer that sums partials.

    Args:
        x: [T, K].
        weight: [N, K], in x's dtype, or the result of `pack_weight`.
        bias: [N] or None.

    Returns:
        [T, N] in x's dtype, or [P, T, N] fp32 partials whose sum, in order of P, rounded to x's
        dtype is bitwise `batch_invariant_linear`.
    """
    return batch_invariant_linear.definition(x, weight, bias)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if weight.is_mkldnn:
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return packed
    return functional.linear(x, weight, bias)


def _product_into(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


@cache
def _heights(rows: int, columns: int, by_columns: bool, num_threads: int) -> tuple[int, ...]:
    """Measure, once per shape, which heights agree for fp32 weights [rows, columns]."""
    del num_threads  # the library's kernel depends on it
    generator = torch.Generator("cpu").manual_seed(1)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float32, device="cpu")
    if by_columns:
        weight = pack_weight.definition(weight)
    return agreeing_heights(
        lambda block, out: _product_into(block, weight, None, out), columns, rows
    )


@op()
def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Look up a row of the table for each token.

    Args:
        token_ids: [T] int32 or int64, each in [0, V).
        weight: [V, E].

    Returns:
        [T, E] in weight's dtype.
    """
    return functional.embedding(token_ids, weight)
