"""The head: the product that scores each token of the vocabulary, in fp32.

Owns what a logit is: a sum of products in fp32 that is not rounded to the weights' dtype. In bf16,
of 8 significant bits, the two likeliest tokens often round to one value, and the lower id would
win.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nv_kernels.linear.definitions import batch_invariant_linear, pack_weight
from nv_kernels.op import op

if TYPE_CHECKING:
    import torch


@op(cpp="nv_kernels.cpp.linear")
def pack_head(weight: torch.Tensor) -> torch.Tensor:
    """Lay the head's weight out as `logits` reads it fastest: once, when a model is loaded.

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
        weight: [V, E], in hidden's dtype, or what `pack_head` made of it.

    Returns:
        [R, V] fp32, accumulated in fp32. A device may round it to hidden's dtype where fp32 would
        cost more than 1 % of a step, and says so in its version.
    """
    return batch_invariant_logits.definition(hidden, weight)


@op(triton="nv_kernels.linear.triton.batch_invariant", cpp="nv_kernels.cpp.linear")
def batch_invariant_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Score each token of the vocabulary, bitwise the same whatever the other rows are.

    Args:
        hidden: [R, E].
        weight: [V, E], in hidden's dtype, or what `pack_head` made of it.

    Returns:
        [R, V] fp32, accumulated in fp32.
    """
    if weight.is_mkldnn:
        return batch_invariant_linear.definition(
            hidden, weight
        ).float()  # torch rounds what it packed
    return batch_invariant_linear.definition(hidden.float(), weight.float())
