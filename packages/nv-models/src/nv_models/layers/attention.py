"""Grouped-query attention over a paged KV cache.

Owns: the projections' weights, and the two steps between them: write K and V, attend.
Never: chooses a backend or a block; both come with the context.
"""

from collections.abc import Iterator

import nv_kernels as nk
import torch
from torch import nn

from nv_models.config import ModelConfig
from nv_models.context import ForwardContext
from nv_models.layers.linear import ColumnLinear, Part, RowLinear
from nv_models.placement import Placement, Shard


class HeadNorm(nn.Module):
    """The weight of an RMS norm over each head; the fused rope applies it."""

    def __init__(self, head_dim: int, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(head_dim)  # [D]

    def shards(self, name: str) -> Iterator[Shard]:
        """The whole weight: all heads share it."""
        yield Shard(self.weight, f"{name}.weight", tuple(self.weight.shape))


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245), with or without qk-norm."""

    def __init__(self, config: ModelConfig, placement: Placement, qk_norm: bool) -> None:
        super().__init__()
        parallel, dim, bias = placement.parallel, config.head_dim, config.attention_bias
        q_heads = parallel.split(config.num_q_heads, "num_attention_heads")
        kv_heads = parallel.split_kv_heads(config.num_kv_heads)
        stacked = (
            Part("q_proj", config.num_q_heads, q_heads, dim),
            Part("k_proj", config.num_kv_heads, kv_heads, dim),
            Part("v_proj", config.num_kv_heads, kv_heads, dim),
        )
        self.qkv_proj = ColumnLinear(config.hidden_size, stacked, bias, placement)
        self.o_proj = RowLinear(config.num_q_heads * dim, config.hidden_size, bias, placement)
        self.q_norm = HeadNorm(dim, placement) if qk_norm else None
        self.k_norm = HeadNorm(dim, placement) if qk_norm else None
        self.num_q_heads = len(q_heads)
        self.eps = config.rms_norm_eps
        self.scale = dim**-0.5

    def forward(
        self, qkv: torch.Tensor, cos_sin: torch.Tensor, kv: nk.KVCache, context: ForwardContext
    ) -> torch.Tensor:
        """Qkv [T, (Hq + 2 Hkv) D] -> [T, Hq D]; this step's K and V are in `kv` afterwards."""
        q = nk.qk_norm_rope_store(
            qkv,
            self.q_norm.weight if self.q_norm else None,
            self.k_norm.weight if self.k_norm else None,
            self.eps,
            context.positions,
            cos_sin,
            kv,
            context.slot_mapping,
            self.num_q_heads,
        )  # [T, Hq, D]
        out = context.backend.attend(q, kv, context.attention, context.plan, self.scale)
        return out.flatten(1)
