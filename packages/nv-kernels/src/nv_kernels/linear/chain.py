"""A decoder layer without its attention, in two pieces that a CUDA graph holds as few launches.

    qkv, stream = attention_input(layer, stream)
    attended = ...                                   # q/k norm, rope, KV write, attention
    stream = attention_output(layer, attended, stream)

Between the pieces travels a `Stream`: the residual, and what is still to be added to it. That sum
is left to the next norm, so that a split-K product needs no kernel of its own to add it up.

Owns the order of the ops, in plain terms below and by device. Never attends, never communicates:
the tensor-parallel reduction is an argument.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from nv_kernels.elementwise.gate import batch_invariant_silu_and_mul, silu_and_mul
from nv_kernels.elementwise.norm import add_rms_norm
from nv_kernels.linear.definitions import batch_invariant_linear, batch_invariant_partials, linear
from nv_kernels.linear.layer import Stream
from nv_kernels.ranks.all_reduce import all_reduce_add_rms_norm

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from nv_kernels.linear.layer import LayerWeights, Reduce

    Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Pieces(Protocol):
    """What a device's own version offers."""

    def attention_input(self, layer: LayerWeights, stream: Stream) -> tuple[torch.Tensor, Stream]:
        """As the function of this module."""

    def attention_output(
        self,
        layer: LayerWeights,
        attended: torch.Tensor,
        stream: Stream,
        reduce: Reduce | None = None,
    ) -> Stream:
        """As the function of this module."""


def attention_input(layer: LayerWeights, stream: Stream) -> tuple[torch.Tensor, Stream]:
    """Normalise and project to queries, keys and values.

    Args:
        layer: the weights.
        stream: the residual before this layer.

    Returns:
        qkv [T, (Hq + 2 Hkv) D], or partials [P, T, …] on a device whose qk_norm_rope_store sums
        them; the stream with nothing pending.
    """
    own = _own(layer, stream)
    if own is not None:
        return own.attention_input(layer, stream)
    normed, hidden = normalise(stream, layer.attention_norm, layer.eps)
    return _products(layer).partials(normed, layer.qkv, layer.qkv_bias), Stream(hidden)


def attention_output(
    layer: LayerWeights,
    attended: torch.Tensor,
    stream: Stream,
    reduce: Reduce | None = None,
) -> Stream:
    """Project attention's output, then the gated feed-forward layer.

    Args:
        layer: the weights.
        attended: [T, Hq D].
        stream: as `attention_input` returned it; its tensors may be written over.
        reduce: sums a [T, E] tensor over the ranks, or None. What a RankSum's peers serve may be
            left to the next norm.

    Returns:
        The stream after this layer.
    """
    own = _own(layer, stream, reduce)
    if own is not None:
        return own.attention_output(layer, attended, stream, reduce)
    products = _products(layer)

    def summed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if reduce is None:
            return products.partials(x, weight, bias)
        return reduce(products.whole(x, weight, bias))

    projected = summed(attended, layer.output, layer.output_bias)
    normed, hidden = normalise(Stream(stream.hidden, projected), layer.mlp_norm, layer.eps)
    gate_up = products.whole(normed, layer.gate_up, layer.gate_up_bias)
    activated = products.gate(gate_up)
    return Stream(hidden, summed(activated, layer.down, layer.down_bias))


def normalise(
    stream: Stream, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add what is pending and normalise; also the end of the last layer.

    Args:
        stream: the residual.
        weight: [E] of the norm.
        eps: added to the mean square.

    Returns:
        The normalised stream [T, E] and the stream itself [T, E].
    """
    if stream.pending is None:
        return add_rms_norm(stream.hidden, None, weight, eps)
    if stream.peers is not None:
        return all_reduce_add_rms_norm(stream.pending, stream.hidden, weight, eps, stream.peers)
    return add_rms_norm(stream.pending, stream.hidden, weight, eps)


class Products(NamedTuple):
    """A product by a weight, for any consumer and for one that sums partials, and the gate."""

    whole: Product
    partials: Product
    gate: Callable[[torch.Tensor], torch.Tensor]


def _products(layer: LayerWeights) -> Products:
    if layer.batch_invariant:
        return Products(
            batch_invariant_linear,
            batch_invariant_partials,
            batch_invariant_silu_and_mul,
        )
    return Products(linear, linear, silu_and_mul)


def _own(layer: LayerWeights, stream: Stream, reduce: Reduce | None = None) -> Pieces | None:
    """Give the device's own version, or None where the plain one serves."""
    if stream.hidden.is_cuda:
        if layer.batch_invariant:
            return None
        return cast("Pieces", importlib.import_module("nv_kernels.linear.triton.chain"))
    if reduce is not None or not stream.hidden.is_cpu:
        return None
    module = importlib.import_module("nv_kernels.cpp.chain")
    return cast("Pieces | None", module.pieces(layer, stream))
