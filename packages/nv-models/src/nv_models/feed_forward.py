"""The part of a layer after attention: a module for each kind of `config.FeedForward`.

Owns the gated MLP, and the choice by the record's kind. A module reads the stream through the norm
that it is given, if any; what it adds must stay pending if `ModelConfig.mlp_stays_pending`.
"""

import nv_kernels as nk
from torch import nn

from nv_models.config import Gated, LayerSpec, ModelConfig
from nv_models.layers.linear import GatedLinear, Part, RowLinear, side_by_side
from nv_models.layers.norm import RMSNorm
from nv_models.placement import Placement


class GatedMLP(nn.Module):
    """SwiGLU and its kin (Shazeer 2020, arXiv 2002.05202): down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, kind: Gated, placement: Placement) -> None:
        super().__init__()
        size, width = config.hidden_size, kind.width
        kept = kind.split(placement.parallel)
        gate_up: tuple[Part, ...] = Part("gate_proj", width, kept), Part("up_proj", width, kept)
        if config.fused.gate_up:
            gate_up = side_by_side("gate_up_proj", gate_up)
        self.gate_up_proj = GatedLinear(
            size, gate_up, kind.bias, placement, activation=kind.activation
        )
        self.down_proj = RowLinear(
            width, size, kind.bias, placement, stays_pending=config.mlp_stays_pending
        )

    def forward(self, stream: nk.Stream, norm: RMSNorm | None) -> nk.Stream:
        """The stream before the MLP -> after it."""
        gated, stream = self.gate_up_proj(stream, norm)  # [T, F]
        return self.down_proj(gated, stream)


def feed_forward(config: ModelConfig, layer: LayerSpec, placement: Placement) -> nn.Module:
    """Make a layer's module, `forward(stream, norm) -> stream`."""
    return GatedMLP(config, layer.feed_forward, placement)
