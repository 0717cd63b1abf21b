"""The head: the product that scores each token of the vocabulary, in fp32.

A logit is a sum of products in fp32 that is not rounded to the weights' dtype. In bf16, which has 8
significant bits, the two likeliest tokens often round to one value, and the lower id would win.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nv_kernels.linear.definitions import batch_invariant_linear, pack_weight
from nv_kernels.op import op

if TYPE_CHECKING:
    import torch


@op(cpp="nv_kernels.cpp.linear")
def pack_head(weight: torch.Tensor) -> torch.Tensor:
    """Convert the head's weight to the layout that `logits` reads fastest, when a model is loaded.

    Args:
        weight: [V, E].

    Returns:
        The weight for `logits` and `batch_invariant_logits`, the same shape.
    """
    return pack_weight.definition(weight)


@op(triton="nv_kernels.linear.triton.logits", cpp="nv_kernels.cpp.linear")
def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Score each token of the vocabulary.

    Args:
        hidden: [R, E].
        weight: [V, E], in hidden's dtype, or the result of `pack_head`.

    Returns:
        [R, V] fp32, accumulated in fp32. A device's version may round it to hidden's dtype
        where fp32 costs more than 1 % of a step, and documents it.
    """
    return batch_invariant_logits.definition(hidden, weight)


@op(triton="nv_kernels.linear.triton.batch_invariant", cpp="nv_kernels.cpp.linear")
def batch_invariant_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Score each token of the vocabulary, bitwise the same whatever the other rows are.

    Args:
        hidden: [R, E].
        weight: [V, E], in hidden's dtype, or the result of `pack_head`.

    Returns:
        [R, V] fp32, accumulated in fp32.
    """
    if weight.is_mkldnn:
        return batch_invariant_linear.definition(
            hidden, weight
        ).float()  # torch rounds the product of a packed weight
    return batch_invariant_linear.definition(hidden.float(), weight.float())
