"""Weights applied to tokens: the matrix product and the table look-up.

Owns both as torch computes them. Never splits them over ranks: nv-models does.
"""

from __future__ import annotations

import torch
from torch.nn import functional

PACKED_ROWS = 16  # tokens that a packed weight is laid out for; it serves any number


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Lay a weight out as `linear` reads it fastest: once, when a model is loaded.

    On a CPU with oneDNN's bf16 this is its blocked layout, which no other op reads: oneDNN would
    have to make it from rows at each call. Elsewhere the weight comes back as it is.

    Args:
        weight: [N, K].

    Returns:
        The weight for `linear`, the same shape.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not _has_packing():
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


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply each row by the transposed weight.

    Args:
        x: [T, K].
        weight: [N, K], in x's dtype, or what `pack_weight` made of it.
        bias: [N] or None.

    Returns:
        [T, N] in x's dtype, accumulated in fp32.
    """
    if weight.is_mkldnn:
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return packed
    if x.shape[0] == 1 and bias is None and not x.is_cuda:
        # On a CPU torch's product with a vector reads the weight faster than that with one row.
        return torch.mv(weight, x[0])[None]
    return functional.linear(x, weight, bias)


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Look up a row of the table for each token.

    Args:
        token_ids: [T] int32 or int64, each in [0, V).
        weight: [V, E].

    Returns:
        [T, E] in weight's dtype.
    """
    return functional.embedding(token_ids, weight)
