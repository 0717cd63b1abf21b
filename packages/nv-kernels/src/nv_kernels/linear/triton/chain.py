"""`nv_kernels.linear.chain` on CUDA tensors: the launches that the chain gains from.

At 1 and 2 tokens four launches: norm + qkv | output + residual | norm + gate_up + silu |
down + residual. From 3 tokens on six: add + norm | qkv | output | add + norm | gate_up + silu |
down, where the norms sum the products' partials. Where the library multiplies, it adds to the
residual itself (and gate_up + silu is two launches, but for many tokens on Hopper). Over ranks
always six where their peer memory serves: the norms sum over it.

Owns that order. Never chooses a product's form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nv_kernels.elementwise.triton_gate import silu_and_mul
from nv_kernels.elementwise.triton_norm import add_rms_norm
from nv_kernels.linear.layer import Stream
from nv_kernels.linear.triton.gemv import gemv
from nv_kernels.linear.triton.product import (
    form_for,
    gated_linear,
    linear,
    linear_partials,
    product,
)
from nv_kernels.linear.tuned import Gemv, Library
from nv_kernels.ranks.peers import RankSum
from nv_kernels.ranks.triton_all_reduce import all_reduce_add_rms_norm

if TYPE_CHECKING:
    import torch

    from nv_kernels.linear.layer import LayerWeights, Reduce


def attention_input(layer: LayerWeights, stream: Stream) -> tuple[torch.Tensor, Stream]:
    """Normalise and project; see `nv_kernels.linear.chain.attention_input`."""
    hidden = stream.hidden
    form = form_for(hidden, layer.qkv)
    if isinstance(form, Gemv) and stream.pending is None:
        norm = (layer.attention_norm, layer.eps)
        return gemv(form, hidden, layer.qkv, norm=norm, bias=layer.qkv_bias), stream
    normed, hidden = _normalise(stream, layer.attention_norm, layer.eps)
    if layer.qkv_bias is not None:
        return linear(normed, layer.qkv, layer.qkv_bias), Stream(hidden)
    return linear_partials(normed, layer.qkv), Stream(hidden)


def attention_output(
    layer: LayerWeights,
    attended: torch.Tensor,
    stream: Stream,
    reduce: Reduce | None = None,
) -> Stream:
    """Project, then feed forward; see `nv_kernels.linear.chain.attention_output`."""
    output, gate_up = form_for(attended, layer.output), form_for(stream.hidden, layer.gate_up,
                                                                 gated=True)  # fmt: skip
    biased = layer.gate_up_bias is not None or layer.down_bias is not None
    if reduce is None and not biased and isinstance(output, Gemv) and isinstance(gate_up, Gemv):
        return _few(layer, attended, stream.hidden, output, gate_up)
    peers = reduce.peers_for(stream.hidden) if isinstance(reduce, RankSum) else None
    if peers is not None:
        reduce = None  # the norms do it
    stream = Stream(stream.hidden, None, peers)
    stream = _add(stream, attended, layer.output, layer.output_bias, reduce)
    normed, hidden = _normalise(stream, layer.mlp_norm, layer.eps)
    if layer.gate_up_bias is None:
        activated = gated_linear(normed, layer.gate_up)
    else:
        activated = silu_and_mul(linear(normed, layer.gate_up, layer.gate_up_bias))
    return _add(Stream(hidden, None, peers), activated, layer.down, layer.down_bias, reduce)


def _add(
    stream: Stream,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    reduce: Reduce | None,
) -> Stream:
    """Add a product to the residual: in place where the library can, else by the next norm."""
    if reduce is not None:
        return stream._replace(pending=reduce(linear(x, weight, bias)))
    if bias is not None:
        return stream._replace(pending=linear(x, weight, bias))
    form = form_for(x, weight)
    if stream.peers is None and isinstance(form, Library):
        # The norm need not read both and write the sum.
        return Stream(stream.hidden.addmm_(x, weight.t()))
    return stream._replace(pending=product(form, x.contiguous(), weight))


def _few(
    layer: LayerWeights, attended: torch.Tensor, hidden: torch.Tensor, output: Gemv, gate_up: Gemv
) -> Stream:
    hidden = gemv(output, attended, layer.output, residual=hidden, bias=layer.output_bias)
    norm = (layer.mlp_norm, layer.eps)
    activated = gemv(gate_up, hidden, layer.gate_up, norm=norm, gated=True)
    down = form_for(activated, layer.down)
    if isinstance(down, Gemv):
        return Stream(gemv(down, activated, layer.down, residual=hidden))
    return Stream(hidden, linear_partials(activated, layer.down))


def _normalise(
    stream: Stream, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if stream.pending is None:
        return add_rms_norm(stream.hidden, None, weight, eps)
    if stream.peers is not None:
        return all_reduce_add_rms_norm(stream.pending, stream.hidden, weight, eps, stream.peers)
    return add_rms_norm(stream.pending, stream.hidden, weight, eps)
