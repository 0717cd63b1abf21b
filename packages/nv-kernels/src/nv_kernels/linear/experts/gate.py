"""The gate of an expert: how its first two products, gate and up, become one.

Owns the numbers in which gates differ, and the definition. The kernels take the numbers as
constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Gate:
    """g sigmoid(alpha g) (u + shift), of the products g (gate) and u (up).

    With the defaults it is SwiGLU (Shazeer 2020, arXiv 2002.05202). GPT-OSS (arXiv 2508.10925) has
    alpha 1.702, with which it approximates a GELU, limit 7 and shift 1.

    Attributes:
        alpha: steepness of the sigmoid.
        limit: g is at most this, and u from minus this to this; None: no limit.
        shift: added to u.
    """

    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0

    def __call__(self, product: torch.Tensor) -> torch.Tensor:
        """Gate in fp32, in plain torch: a row's bits do not depend on the others.

        Args:
            product: [T, 2F], gate then up.

        Returns:
            [T, F] in product's dtype. What multiplies u is rounded to it first.
        """
        gate, up = product.float().chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        divisor = (gate * -self.alpha).exp_().add_(1.0)
        activated = (gate / divisor).to(product.dtype)
        return (activated.float() * (up + self.shift)).to(product.dtype)


SWIGLU = Gate()
