"""The part of a layer after attention: a module for each kind of `config.FeedForward`.

Owns the gated MLP, and the choice by the record's kind. A module reads the stream through the norm
that it is given; what it adds must stay pending where a norm follows (`LayerNorms.after_mlp`).
"""

import nv_kernels as nk
from torch import nn

from nv_models.config import Gated, LayerSpec, ModelConfig
from nv_models.layers.linear import GatedLinear, Part, RowLinear
from nv_models.layers.norm import RMSNorm
from nv_models.placement import Placement


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, kind: Gated, placement: Placement) -> None:
        super().__init__()
        size, width = config.hidden_size, kind.width
        kept = kind.split(placement.parallel)
        gate_up = Part("gate_proj", width, kept), Part("up_proj", width, kept)
        self.gate_up_proj = GatedLinear(size, gate_up, kind.bias, placement)
        normed = config.norms.after_mlp is not None
        self.down_proj = RowLinear(width, size, kind.bias, placement, is_normed=normed)

    def forward(self, stream: nk.Stream, norm: RMSNorm) -> nk.Stream:
        """The stream before the MLP -> after it."""
        gated, stream = self.gate_up_proj(stream, norm)  # [T, F]
        return self.down_proj(gated, stream)


def feed_forward(config: ModelConfig, layer: LayerSpec, placement: Placement) -> nn.Module:
    """Make a layer's module, `forward(stream, norm) -> stream`."""
    return GatedMLP(config, layer.feed_forward, placement)
