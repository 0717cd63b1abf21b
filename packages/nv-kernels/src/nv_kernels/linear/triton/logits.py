"""The head on a card: the products of `linear`, not rounded to 16 bits.

Owns which steps have fp32 logits.
"""

from __future__ import annotations

import torch

from nv_kernels.linear.triton.product import form_for, library_product, product
from nv_kernels.linear.tuned import Gemv, Library

ROUNDED_ROWS = range(17, 65)
SMALL_HIDDEN = 1024


def is_rounded(num_rows: int, hidden_size: int) -> bool:
    """Whether logits keep hidden's dtype, because fp32 costs more than 1 % of a step.

    Measured on an H200 at 1, 64 and 256 rows (benchmarks/results/h200/head.json): steps of
    Qwen3-0.6B (hidden size 1024) of 64 rows take 1.2 to 2.8 % longer with fp32 logits, of 1 and 256
    rows at most 0.7 % (with top-p 1.8 % at 1 row). A larger model's step is longer, its logits not.
    """
    return num_rows in ROUNDED_ROWS and hidden_size <= SMALL_HIDDEN


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Score each token of the vocabulary; see `nv_kernels.reference.logits`.

    Args:
        hidden: [R, E].
        weight: [V, E], in hidden's dtype.

    Returns:
        [R, V] fp32, or in hidden's dtype if `is_rounded`; accumulated in fp32.
    """
    dtype = hidden.dtype if is_rounded(*hidden.shape) else torch.float32
    form, hidden = form_for(hidden, weight), hidden.contiguous()
    if isinstance(form, Gemv | Library) or form.split_k == 1:
        return product(form, hidden, weight, dtype=dtype)
    return library_product(hidden, weight, dtype)  # the draw cannot sum partials
