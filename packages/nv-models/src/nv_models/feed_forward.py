"""The part of a layer after attention: a module for each kind of `config.FeedForward`.

Owns the gated MLP, the mixture of experts, and the choice by the record's kind. A module reads the
stream through the norm that it is given, if any; what it adds must stay pending if
`ModelConfig.mlp_stays_pending`.
"""

import nv_kernels as nk
from torch import nn

from nv_models.config import Gated, LayerSpec, Mixture, ModelConfig
from nv_models.layers.experts import ExpertMLPs, Router
from nv_models.layers.layer import Layer
from nv_models.layers.linear import GatedLinear, Part, RowLinear, side_by_side
from nv_models.layers.norm import RMSNorm
from nv_models.placement import Placement


class GatedMLP(Layer):
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

    def forward(
        self, stream: nk.Stream, norm: RMSNorm | None, lora: nk.LoraPlan | None = None
    ) -> nk.Stream:
        """The stream before the MLP -> after it."""
        gated, stream = self.gate_up_proj(stream, norm, lora)  # [T, F]
        return self.down_proj(gated, stream, lora)


class MixtureOfExperts(Layer):
    """The weighted sum of the gated MLPs that a router chooses for each token.

    Shazeer et al. 2017, arXiv 1701.06538, with the softmax of Qwen3 and Mixtral (arXiv 2401.04088).
    """

    def __init__(self, config: ModelConfig, kind: Mixture, placement: Placement) -> None:
        super().__init__()
        assert not config.mlp_stays_pending, "no architecture norms or scales what experts add"
        self.gate = Router(config.hidden_size, kind, placement)
        self.experts = ExpertMLPs(config.hidden_size, kind, placement)

    def forward(
        self, stream: nk.Stream, norm: RMSNorm | None, lora: nk.LoraPlan | None = None
    ) -> nk.Stream:
        """The stream before the experts -> after it, with their sum pending."""
        del lora  # experts have no adapters
        assert norm is not None, "no architecture has experts that read the stream itself"
        return self.experts(stream, norm, self.gate)


def feed_forward(config: ModelConfig, layer: LayerSpec, placement: Placement) -> nn.Module:
    """Make a layer's module, `forward(stream, norm, lora) -> stream`."""
    kind = layer.feed_forward
    if isinstance(kind, Mixture):
        return MixtureOfExperts(config, kind, placement)
    assert isinstance(kind, Gated), "a plain MLP is in the class of its model"
    return GatedMLP(config, kind, placement)
