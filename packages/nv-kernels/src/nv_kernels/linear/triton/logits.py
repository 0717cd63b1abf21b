"""The head on a card: the products of `linear`, not rounded to 16 bits.

Owns up to how many rows logits are fp32. Never cuts: `forms` does.
"""

from __future__ import annotations

import torch

from nv_kernels.linear.triton.product import form_for, library_product, product
from nv_kernels.linear.tuned import Gemv, Library

FP32_ROWS = 2**31 - 1  # of a step up to which logits are not rounded


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Score each token of the vocabulary; see `nv_kernels.reference.logits`.

    Args:
        hidden: [R, E].
        weight: [V, E], in hidden's dtype.

    Returns:
        [R, V] fp32 for up to FP32_ROWS rows, else in hidden's dtype; accumulated in fp32.
    """
    dtype = torch.float32 if hidden.shape[0] <= FP32_ROWS else hidden.dtype
    form, hidden = form_for(hidden, weight), hidden.contiguous()
    if isinstance(form, Gemv | Library) or form.split_k == 1:
        return product(form, hidden, weight, dtype=dtype)
    return library_product(hidden, weight, dtype)  # a draw sums no partials
