"""The gated activation of the feed-forward layer.

Owns SwiGLU's elementwise half. Never multiplies by a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    import torch


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate the second half of each row with the SiLU of the first (Shazeer, 2020).

    Args:
        x: [T, 2F], gate then up. The SiLU is rounded to x's dtype before it multiplies.

    Returns:
        [T, F] in x's dtype.
    """
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up
