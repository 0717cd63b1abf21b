"""The gated feed-forward layer. Owns: three matrices, two of them stacked in one."""

from torch import nn

from nv_models.config import ModelConfig
from nv_models.layers.linear import ColumnLinear, Part, RowLinear
from nv_models.placement import Placement


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        width = config.intermediate_size
        kept = placement.parallel.split(width, "intermediate_size")
        gate_up = Part("gate_proj", width, kept), Part("up_proj", width, kept)
        self.gate_up_proj = ColumnLinear(config.hidden_size, gate_up, config.mlp_bias, placement)
        self.down_proj = RowLinear(width, config.hidden_size, config.mlp_bias, placement)
