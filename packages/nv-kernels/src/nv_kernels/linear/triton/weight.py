"""A dense weight on a card: fused launches for few tokens.

At 1 and 2 tokens each op is one launch: the norm is in the product's prologue, the gate or the
residual in its epilogue. From 3 tokens on the norm is a launch of its own, which sums the partials
of a split product. Where the library multiplies, it adds the residual too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nv_kernels.linear.lora.triton_shrink import shrink_few
from nv_kernels.linear.lora.weight import Adapted
from nv_kernels.linear.stream import Stream
from nv_kernels.linear.triton.dot import dot
from nv_kernels.linear.triton.gemv import GemvAdapters, gemv
from nv_kernels.linear.triton.product import (
    adapted_form,
    form_for,
    gated_linear,
    linear_partials,
    one_launch,
)
from nv_kernels.linear.tuned import Dot, Gemv, Library
from nv_kernels.linear.weight import Dense

if TYPE_CHECKING:
    import torch

    from nv_kernels.linear.lora.plan import LoraPlan
    from nv_kernels.linear.lora.weight import LoraWeights
    from nv_kernels.linear.stream import Norm
    from nv_kernels.ranks.peers import RankSum


@dataclass(frozen=True)
class TritonDense(Dense):
    """Floats on a card."""

    def partials(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.partials`."""
        return linear_partials(x, self.values) if bias is None else self.linear(x, bias)

    def gated_linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.gated_linear`."""
        return gated_linear(x, self.values) if bias is None else super().gated_linear(x, bias)

    def norm_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """See `Weight.norm_linear`."""
        form = form_for(stream.hidden, self.values)
        if stream.pending is not None or not isinstance(form, Gemv):
            return super().norm_linear(stream, norm, bias)
        prologue = (norm.weight, norm.eps)
        product = one_launch(form, stream.hidden, self.values, norm=prologue, bias=bias)
        return product, stream

    def norm_gated_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """See `Weight.norm_gated_linear`."""
        form = form_for(stream.hidden, self.values, gated=True)
        if stream.pending is not None or bias is not None or not isinstance(form, Gemv):
            return super().norm_gated_linear(stream, norm, bias)
        prologue = (norm.weight, norm.eps)
        return one_launch(form, stream.hidden, self.values, norm=prologue, gated=True), stream

    def linear_add(
        self,
        x: torch.Tensor,
        stream: Stream,
        bias: torch.Tensor | None = None,
        rank_sum: RankSum | None = None,
    ) -> Stream:
        """See `Weight.linear_add`."""
        form = form_for(x, self.values)
        if rank_sum is None and isinstance(form, Gemv):
            x = x.contiguous()
            return Stream(one_launch(form, x, self.values, residual=stream.hidden, bias=bias))
        if rank_sum is None and bias is None and isinstance(form, Library):
            return Stream(stream.hidden.addmm_(x, self.values.t()))  # in place
        return super().linear_add(x, stream, bias, rank_sum)

    def adapted(self, lora: LoraWeights, plan: LoraPlan) -> TritonAdapted:
        """See `Weight.adapted`."""
        return TritonAdapted(self, lora, plan)


@dataclass(frozen=True)
class TritonAdapted(Adapted):
    """Floats on a card with adapters.

    For 1 and 2 tokens one more launch computes the hidden values, and the base's kernel
    multiplies them by B. From 3 to 64 the base's kernel does both. With more tokens, or where such
    a kernel does not fit, it is two launches more.
    """

    base: TritonDense

    def partials(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.partials`."""
        x, values = x.contiguous(), self.base.values
        form = adapted_form(x, values, self.lora)
        if isinstance(form, Gemv):
            return gemv(form, x, values, bias=bias, adapters=self._few(x))
        if isinstance(form, Dot) and bias is None:
            return dot(form, x, values, adapters=(self.lora, self.plan))
        return self.added(self.base.partials(x, bias), x)

    def gated_linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.gated_linear`."""
        x, values = x.contiguous(), self.base.values
        form = adapted_form(x, values, self.lora, gated=True)
        if bias is None and isinstance(form, Gemv):
            return gemv(form, x, values, gated=True, adapters=self._few(x))
        if bias is None and isinstance(form, Dot):
            return dot(form, x, values, gated=True, adapters=(self.lora, self.plan))
        return super().gated_linear(x, bias)

    def norm_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """See `Weight.norm_linear`."""
        x, values = stream.hidden, self.base.values
        form = adapted_form(x, values, self.lora)
        if stream.pending is not None or not isinstance(form, Gemv):
            return super().norm_linear(stream, norm, bias)
        prologue, adapters = (norm.weight, norm.eps), self._few(x, norm.weight)
        return gemv(form, x, values, norm=prologue, bias=bias, adapters=adapters), stream

    def norm_gated_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """See `Weight.norm_gated_linear`."""
        x, values = stream.hidden, self.base.values
        form = adapted_form(x, values, self.lora, gated=True)
        if stream.pending is not None or bias is not None or not isinstance(form, Gemv):
            return super().norm_gated_linear(stream, norm, bias)
        prologue, adapters = (norm.weight, norm.eps), self._few(x, norm.weight)
        return gemv(form, x, values, norm=prologue, gated=True, adapters=adapters), stream

    def linear_add(
        self,
        x: torch.Tensor,
        stream: Stream,
        bias: torch.Tensor | None = None,
        rank_sum: RankSum | None = None,
    ) -> Stream:
        """See `Weight.linear_add`."""
        x, values = x.contiguous(), self.base.values
        form = adapted_form(x, values, self.lora)
        if rank_sum is None and isinstance(form, Gemv):
            added, adapters = stream.hidden, self._few(x)
            return Stream(gemv(form, x, values, residual=added, bias=bias, adapters=adapters))
        if rank_sum is None and form is None:
            total = self.base.linear_add(x, stream, bias)
            if total.pending is None:
                return Stream(self.added(total.hidden, x))
            return Stream(total.hidden, self.added(total.pending, x))
        return super().linear_add(x, stream, bias, rank_sum)

    def _few(self, x: torch.Tensor, norm_weight: torch.Tensor | None = None) -> GemvAdapters:
        """The adapters of one or two tokens, for their product."""
        lora, adapters = self.lora, self.plan.adapters
        hidden = shrink_few(x, lora.a, adapters, norm_weight)
        return GemvAdapters(hidden, lora.b, adapters, lora.part_rows)


def dense_weight(values: torch.Tensor) -> TritonDense:
    """Make a weight; see `nv_kernels.linear.weight.dense_weight`."""
    return TritonDense(values)
