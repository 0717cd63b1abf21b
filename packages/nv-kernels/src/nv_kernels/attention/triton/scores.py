"""Scores in base 2, in which the kernels' softmax works: their scale, their softcap, the sinks.

exp2 is one instruction of a card, so scores are multiplied by log2(e). With a softcap this
multiplication follows the cap, and what precedes the cap is part of its exponential's argument.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from nv_kernels.attention.metadata import AttentionSpec

LOG2_E = tl.constexpr(math.log2(math.e))


def score_scale(spec: AttentionSpec) -> float:
    """Return what the kernels multiply q.k by: for the score in base 2, or for `soft_cap`."""
    factor = spec.scale * math.log2(math.e)
    return factor if spec.softcap is None else 2 * factor / spec.softcap


@triton.jit
def soft_cap(products, scale):
    """Return tanh(score / cap) of products of query and key; scale is the `score_scale`.

    tanh(x) = 1 - 2 / (1 + e^2x). The error of a small x is absolute, 6e-8; times the cap it is far
    below what the rounding of 16-bit queries and keys changes.
    """
    return 1.0 - 2.0 / (tl.exp2(products * scale) + 1.0)


@triton.jit
def score_factor(scale, SOFTCAP: tl.constexpr):
    """Return what products, or with a SOFTCAP (0: none) the `soft_cap` of them, are multiplied by.

    The result is the score in base 2.
    """
    if SOFTCAP > 0:
        factor = tl.full((), SOFTCAP * LOG2_E, tl.float32)
    else:
        factor = scale
    return factor


@triton.jit
def load_sinks(sinks_ptr, head, member, GROUP: tl.constexpr):
    """Load the sinks of members of a kv head's group, in base 2; members past the group: 0."""
    sinks = tl.load(sinks_ptr + head * GROUP + member, mask=member < GROUP, other=0.0)
    return sinks.to(tl.float32) * LOG2_E
