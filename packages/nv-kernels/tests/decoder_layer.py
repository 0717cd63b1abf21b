"""A decoder layer without its attention, as models compute it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class RMS(NamedTuple):
    """A `nk.Norm`."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Layer:
    """The tensors of a layer."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    eps: float
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def before_attention(layer, stream, weight):
    """Stream -> qkv, stream; `weight` makes a `nk.Weight` of a tensor."""
    norm = RMS(layer.attention_norm, layer.eps)
    return weight(layer.qkv).norm_linear(stream, norm, layer.qkv_bias)


def after_attention(layer, attended, stream, weight, rank_sum=None):
    """Attention's output, stream -> stream."""
    norm = RMS(layer.mlp_norm, layer.eps)
    stream = weight(layer.output).linear_add(attended, stream, layer.output_bias, rank_sum)
    gated, stream = weight(layer.gate_up).norm_gated_linear(stream, norm, layer.gate_up_bias)
    return weight(layer.down).linear_add(gated, stream, layer.down_bias, rank_sum)
