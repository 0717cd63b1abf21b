"""Quantized weights on a card: their kernels by number of tokens, fused as a layer uses them.

Where x is quantized, the launch that norms it writes its codes. From 65 tokens on a weight-only
product dequantizes a tile at a time, and for very many the whole matrix, once per product, for the
library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from torch.nn.functional import ScalingType

from nv_kernels.elementwise.triton_gate import silu_and_mul
from nv_kernels.launch.card import capability, is_hopper
from nv_kernels.linear.quantized.blocks import Blocks
from nv_kernels.linear.quantized.fp8 import Fp8
from nv_kernels.linear.quantized.grouped import Grouped
from nv_kernels.linear.quantized.int8 import Int8
from nv_kernels.linear.quantized.tokens import BLOCK
from nv_kernels.linear.quantized.triton_tokens import (
    norm_tokens,
    quantize_tokens_fp8,
    quantize_tokens_int8,
)
from nv_kernels.linear.quantized.tuned import (
    Form,
    GluonForm,
    Groups,
    Tile,
    Warps,
    by_rule,
    choose,
    invariant_tile,
    tile_for,
)
from nv_kernels.linear.quantized.weight import BatchInvariantQuantized
from nv_kernels.linear.stream import Stream, normalise
from nv_kernels.linear.triton.product import gated_linear, library_product
from nv_kernels.linear.triton.quantized_codes import codes_product
from nv_kernels.linear.triton.quantized_forms import (
    added_product,
    codes_fit,
    gluon_codes_product,
    grouped_fits,
    grouped_product,
    normed_product,
)
from nv_kernels.linear.triton.quantized_grouped import dequantize, grouped
from nv_kernels.linear.triton.quantized_layout import LaidOut, fits, lay_out_fp8, lay_out_grouped
from nv_kernels.linear.tuned import Library
from nv_kernels.linear.weight import Weight

if TYPE_CHECKING:
    from nv_kernels.linear.quantized.record import Quantized
    from nv_kernels.linear.stream import Norm
    from nv_kernels.ranks.peers import RankSum

FP8_CAPABILITY = 9  # from which on Triton's dots take e4m3


def summed(out: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Add partials [P, T, N] and the bias, in fp32, and round once."""
    if out.dim() == 3:
        out = out.sum(0)
    if bias is not None:
        out = out.float() + bias
    return out.to(dtype)


@dataclass(frozen=True)
class TritonGrouped(Weight):
    """Codes on a card, for products that do not quantize x."""

    laid: LaidOut

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        return self.laid.num_bytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.linear`."""
        return summed(self._product(self._ordered(x)), bias, x.dtype)

    def partials(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.partials`."""
        return self._product(self._ordered(x)) if bias is None else self.linear(x, bias)

    def gated_linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.gated_linear`."""
        if bias is not None or self.laid.num_rows % 64:
            return silu_and_mul(self.linear(x, bias))
        x = self._ordered(x)
        form = self._form(x, gated=True)
        if isinstance(form, Library):
            return gated_linear(x, dequantize(self.laid, x.dtype))
        if isinstance(form, GluonForm):
            return grouped_product(form, x, self.laid, gated=True)
        return grouped(form, x, self.laid, gated=True)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Weight.logits`."""
        return summed(self._product(self._ordered(hidden), torch.float32), None, torch.float32)

    def linear_add(
        self,
        x: torch.Tensor,
        stream: Stream,
        bias: torch.Tensor | None = None,
        rank_sum: RankSum | None = None,
    ) -> Stream:
        """See `Weight.linear_add`."""
        if rank_sum is not None or bias is not None:
            return super().linear_add(x, stream, bias, rank_sum)
        if isinstance(self._form(x), Library):
            values = dequantize(self.laid, x.dtype)
            return Stream(stream.hidden.addmm_(self._ordered(x), values.t()))  # in place
        form = self._fused(x)
        hidden = stream.hidden
        if form is None or hidden.dtype != x.dtype or not hidden.is_contiguous():
            return super().linear_add(x, stream)
        return Stream(added_product(form, x, self.laid, hidden))

    def norm_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """See `Weight.norm_linear`."""
        form = self._fused(stream.hidden)
        if form is None or bias is not None or not _adds(stream):
            return super().norm_linear(stream, norm, bias)
        return normed_product(form, stream, norm, self.laid, gated=False)

    def norm_gated_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """See `Weight.norm_gated_linear`."""
        form = None if self.laid.num_rows % 64 else self._fused(stream.hidden, gated=True)
        if form is None or bias is not None or not _adds(stream):
            return super().norm_gated_linear(stream, norm, bias)
        return normed_product(form, stream, norm, self.laid, gated=True)

    def _product(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Multiply without a bias: [T, N], or partials."""
        form = self._form(x)
        if isinstance(form, Library):
            return library_product(x, dequantize(self.laid, x.dtype), dtype or x.dtype)
        if isinstance(form, GluonForm):
            return grouped_product(form, x, self.laid, dtype=dtype)
        return grouped(form, x, self.laid, dtype=dtype)

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with its columns in the codes' order."""
        return x.contiguous() if self.laid.order is None else x[:, self.laid.order]

    def _form(self, x: torch.Tensor, *, gated: bool = False) -> Form:
        """Choose a form that runs here."""
        laid = self.laid
        record = "4 bits" if laid.kind == "4" else "8 bits"
        product = record, x.shape[0], laid.num_rows, laid.num_columns, gated
        form = choose(*product)
        is_measured = laid.offset is None and laid.scale.dtype == torch.bfloat16
        if isinstance(form, Warps | Groups) and not (
            is_measured and grouped_fits(form, x, laid, gated=gated)
        ):
            form = by_rule(*product)
        if isinstance(form, GluonForm) and not grouped_fits(form, x, laid, gated=gated):
            return tile_for(form, x.shape[0])
        return form

    def _fused(self, x: torch.Tensor, *, gated: bool = False) -> Warps | None:
        """Return the form of one token whose kernel norms x and adds the residual, or None."""
        if x.shape[0] != 1 or self.laid.order is not None:
            return None
        form = self._form(x, gated=gated)  # contiguous, or it has another form
        return form if isinstance(form, Warps) and form.split_k == 1 else None


def _adds(stream: Stream) -> bool:
    """Whether the kernel of one token can add what is pending: nothing, or fp32 partials."""
    pending = stream.pending
    if pending is None:
        return True
    is_partials = pending.dim() == 3 and pending.dtype == torch.float32
    return stream.peers is None and is_partials and pending.is_contiguous()


@dataclass(frozen=True)
class BatchInvariantTritonGrouped(TritonGrouped):
    """The same; a token's bits do not depend on the other tokens."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.linear`."""
        return grouped(self._tile, self._ordered(x), self.laid, bias=bias, spread=False)

    def partials(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.partials`."""
        spread = bias is None and x.shape[0] <= INVARIANT_TOKENS
        return grouped(self._tile, self._ordered(x), self.laid, bias=bias, spread=spread)

    def gated_linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.gated_linear`."""
        return silu_and_mul(self.linear(x, bias))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Weight.logits`."""
        x = self._ordered(hidden)
        return grouped(self._tile, x, self.laid, spread=False, dtype=torch.float32)

    def linear_add(
        self,
        x: torch.Tensor,
        stream: Stream,
        bias: torch.Tensor | None = None,
        rank_sum: RankSum | None = None,
    ) -> Stream:
        """See `Weight.linear_add`."""
        return self.linear_pending(x, stream, bias, rank_sum)

    def _fused(self, x: torch.Tensor, *, gated: bool = False) -> None:
        """No kernel of one token: it would add in another order."""

    @property
    def _tile(self) -> Tile:
        return invariant_tile(self.laid.num_rows, self.laid.num_columns)


INVARIANT_TOKENS = 256  # up to this number the parts of K are spread over programs


@dataclass(frozen=True)
class TritonCodes(Weight):
    """Codes of 8 bits on a card, for tokens in codes: `Fp8` and `Int8`.

    Attributes:
        codes: [N, K] e4m3 or int8.
        scale: fp32, [N] or of blocks of 128 by 128.
        inputs: how x is quantized, as `quantize_tokens_fp8` takes it; int8 is always by "token".
    """

    codes: torch.Tensor
    scale: torch.Tensor
    inputs: str | float

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        return self.codes.nbytes + self.scale.nbytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.linear`."""
        return summed(self._product(*self._quantized(x), x.dtype), bias, x.dtype)

    def partials(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.partials`."""
        out = self._product(*self._quantized(x), x.dtype)
        return out if bias is None else summed(out, bias, x.dtype)

    def gated_linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.gated_linear`."""
        if bias is not None:
            return silu_and_mul(self.linear(x, bias))
        return self._gated(*self._quantized(x), x.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Weight.logits`."""
        out = self._product(*self._quantized(hidden), torch.float32)
        return summed(out, None, torch.float32)

    def norm_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """See `Weight.norm_linear`."""
        dtype = stream.hidden.dtype
        codes, scales, stream = self._normed(stream, norm)
        out = self._product(codes, scales, dtype)
        return out if bias is None else summed(out, bias, dtype), stream

    def norm_gated_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """See `Weight.norm_gated_linear`."""
        dtype = stream.hidden.dtype
        codes, scales, stream = self._normed(stream, norm)
        if bias is not None:
            out = self._product(codes, scales, dtype)
            return silu_and_mul(summed(out, bias, dtype)), stream
        return self._gated(codes, scales, dtype), stream

    def _normed(self, stream: Stream, norm: Norm) -> tuple[torch.Tensor, torch.Tensor, Stream]:
        """Add the pending product, norm and quantize."""
        if stream.peers is not None:  # the norm sums over the ranks
            normed, stream = normalise(stream, norm)
            return *self._quantized(normed), stream
        codes, scales, total = norm_tokens(
            stream.hidden, stream.pending, norm, self.codes.dtype, self.inputs
        )
        return codes, scales, Stream(total)

    def _quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.codes.dtype == torch.int8:
            return quantize_tokens_int8(x)
        return quantize_tokens_fp8(x, self.inputs)

    def _product(
        self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Multiply codes: [T, N], or partials."""
        form = self._form(codes, dtype)
        if isinstance(form, Library):
            return self._library(codes, scales)
        tensors = codes, scales, self.codes, self.scale
        if isinstance(form, GluonForm):
            return gluon_codes_product(form, *tensors, dtype=dtype)
        return codes_product(form, *tensors, dtype=dtype)

    def _gated(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Multiply codes by gate and up, and gate."""
        if self.codes.shape[0] % 64:
            return silu_and_mul(summed(self._product(codes, scales, dtype), None, dtype))
        form = self._form(codes, dtype, gated=True)
        if isinstance(form, Library):
            return silu_and_mul(self._library(codes, scales))
        tensors = codes, scales, self.codes, self.scale
        if isinstance(form, GluonForm):
            return gluon_codes_product(form, *tensors, dtype=dtype, gated=True)
        return codes_product(form, *tensors, dtype=dtype, gated=True)

    def _form(self, codes: torch.Tensor, dtype: torch.dtype, *, gated: bool = False) -> Form:
        """Choose a form that runs here."""
        rows, columns = self.codes.shape
        record = "int8" if codes.dtype == torch.int8 else "fp8"
        if self.scale.dim() == 2 or self.inputs == "block":
            record = "fp8 blocks"
        product = record, codes.shape[0], rows, columns, gated
        form = choose(*product)
        is_measured = (self.scale.dim() == 2) == (self.inputs == "block")
        if isinstance(form, Groups) and not (
            is_measured and codes_fit(form, codes, self.codes, gated=gated)
        ):
            form = by_rule(*product)
        if isinstance(form, GluonForm) and not codes_fit(form, codes, self.codes, gated=gated):
            return tile_for(form, codes.shape[0])
        if isinstance(form, Library) and not self._library_fits(codes, dtype):
            return tile_for(form, codes.shape[0])
        return form

    def _library(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Multiply by the library's kernel, which adds in fp32 unlike its `use_fast_accum`."""
        if self.scale.dim() == 1:
            return torch._scaled_mm(
                codes, self.codes.t(), scales, self.scale[None], out_dtype=torch.bfloat16
            )
        return functional.scaled_mm(
            codes, self.codes.t(), scales, ScalingType.BlockWise1x128,
            self.scale.t(), ScalingType.BlockWise128x128,
        )  # fmt: skip

    def _library_fits(self, codes: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether the library multiplies these: e4m3, all scales of rows or all of blocks."""
        rows, columns = self.codes.shape
        has_blocks = self.scale.dim() == 2
        unit = BLOCK if has_blocks else 16
        return (
            dtype == torch.bfloat16
            and has_blocks == (self.inputs == "block")
            and rows % unit == 0
            and columns % unit == 0
            and (is_hopper(codes) and codes.shape[0] % 4 == 0 if has_blocks else codes.is_cuda)
        )


@dataclass(frozen=True)
class BatchInvariantTritonCodes(TritonCodes):
    """The same; a token's bits do not depend on the other tokens."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.linear`."""
        return self._invariant(*self._quantized(x), x.dtype, bias)

    def partials(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.partials`."""
        codes, scales = self._quantized(x)
        if bias is None:
            return self._product(codes, scales, x.dtype)
        return self._invariant(codes, scales, x.dtype, bias)

    def gated_linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Weight.gated_linear`."""
        return silu_and_mul(self.linear(x, bias))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Weight.logits`."""
        return self._invariant(*self._quantized(hidden), torch.float32, None)

    def norm_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """See `Weight.norm_linear`."""
        dtype = stream.hidden.dtype
        codes, scales, stream = self._normed(stream, norm)
        if bias is None:
            return self._product(codes, scales, dtype), stream
        return self._invariant(codes, scales, dtype, bias), stream

    def norm_gated_linear(
        self, stream: Stream, norm: Norm, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Stream]:
        """See `Weight.norm_gated_linear`."""
        dtype = stream.hidden.dtype
        codes, scales, stream = self._normed(stream, norm)
        return silu_and_mul(self._invariant(codes, scales, dtype, bias)), stream

    def _product(
        self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Multiply codes: partials of few tokens."""
        spread = codes.shape[0] <= INVARIANT_TOKENS
        return self._invariant(codes, scales, dtype, None, spread=spread)

    def _invariant(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        *,
        spread: bool = False,
    ) -> torch.Tensor:
        rows, columns = self.codes.shape
        return codes_product(
            invariant_tile(rows, columns), codes, scales, self.codes, self.scale,
            dtype=dtype, bias=bias, spread=spread, same_sums=True,
        )  # fmt: skip


def quantized_weight(record: Quantized) -> Weight:
    """Make a weight; see `nv_kernels.linear.quantized.weight.quantized_weight`."""
    return _weight(record, TritonGrouped, TritonCodes) or record


def batch_invariant_quantized_weight(record: Quantized) -> Weight:
    """Make a weight; see `nv_kernels.linear.quantized.weight`."""
    made = _weight(record, BatchInvariantTritonGrouped, BatchInvariantTritonCodes)
    return made or BatchInvariantQuantized(record)


def _weight(
    record: Quantized, by_values: type[TritonGrouped], by_codes: type[TritonCodes]
) -> Weight | None:
    """Make the weight of a record; None if no kernel takes it."""
    if isinstance(record, Blocks):
        record = record.grouped()
    if isinstance(record, Int8):
        return by_codes(record.codes.contiguous(), record.scale.contiguous(), "token")
    if isinstance(record, Fp8):
        on_units = record.device.type != "cuda" or capability(record.device) >= FP8_CAPABILITY
        if record.inputs is None or not on_units:
            return by_values(lay_out_fp8(record))
        return by_codes(record.codes.contiguous(), record.scale.contiguous(), record.inputs)
    if isinstance(record, Grouped) and fits(record.shape[1], record.scale.shape[1]):
        return by_values(lay_out_grouped(record))
    return None
