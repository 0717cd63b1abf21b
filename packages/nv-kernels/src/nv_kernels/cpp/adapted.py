"""A weight of the compiled kernels with adapters of low rank beside it.

The base's product is made by the same kernel as without adapters, so that a row's bits do not
depend on whether another row has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nv_kernels.elementwise.gate import silu_and_mul
from nv_kernels.elementwise.norm import rms_norm
from nv_kernels.linear.lora.plan import lora_plan
from nv_kernels.linear.lora.products import lora_expand, lora_shrink
from nv_kernels.linear.lora.weight import Adapted
from nv_kernels.linear.stream import Stream, add_pending

if TYPE_CHECKING:
    import torch

    from nv_kernels.linear.stream import Norm


class CppAdapted(Adapted):
    """The same on a CPU, whose fused kernels stay those of the base."""

    def gated_linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.gated_linear`."""
        return silu_and_mul(self.linear(x, bias))

    def norm_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """See `Weight.norm_linear`."""
        product, stream = self.base.norm_linear(stream, norm, bias)
        return self.added(product, rms_norm(stream.hidden, norm.weight, norm.eps)), stream

    def norm_gated_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """See `Weight.norm_gated_linear`."""
        stream = add_pending(stream)
        adapters = self.plan.adapters
        rows = (adapters >= 0).nonzero()[:, 0]
        if len(rows) == len(adapters):
            normed = rms_norm(stream.hidden, norm.weight, norm.eps)
            return self.gated_linear(normed, bias), stream
        others = (adapters < 0).nonzero()[:, 0]
        gated, _ = self.base.norm_gated_linear(Stream(stream.hidden[others]), norm, bias)
        out = gated.new_empty(len(adapters), gated.shape[1])
        out[others] = gated
        if len(rows):
            normed = rms_norm(stream.hidden[rows], norm.weight, norm.eps)
            plan = lora_plan(adapters[rows], self.lora.a.shape[0], len(rows))
            hidden = lora_shrink(normed, self.lora.a, plan)
            product = self.base.linear(normed, bias)
            lora_expand(product, hidden, self.lora.b, self.lora.part_rows, plan)
            out[rows] = silu_and_mul(product)
        return out, stream
