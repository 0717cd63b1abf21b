"""Llama (Touvron et al. 2023, arXiv 2302.13971), versions 1 to 3.x, and what shares its class.

The same residual stream as qwen3.py, whose notes hold here too; queries and keys go to the rotation
without a norm, and the MLP may have biases.

Shapes: T tokens of a step, R rows that sample, E hidden size, V vocabulary.
"""

import nv_kernels as nk
import torch
from torch import nn

from nv_models.causal import CausalLM
from nv_models.config import ModelConfig
from nv_models.context import ForwardContext
from nv_models.layers.attention import Attention
from nv_models.layers.embedding import Vocabulary
from nv_models.layers.mlp import GatedMLP
from nv_models.layers.norm import RMSNorm
from nv_models.placement import Placement
from nv_models.rope import cos_sin_table


class LlamaLayer(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, placement)
        self.self_attn = Attention(config, placement, qk_norm=False)
        self.post_attention_layernorm = RMSNorm(size, eps, placement)
        self.mlp = GatedMLP(config, placement)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cos_sin: torch.Tensor,
        kv: nk.KVCache,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, E] -> the MLP's output, still to be added, and the stream."""
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, cos_sin, kv, context)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class LlamaBody(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        self.embed_tokens = Vocabulary(config.vocab_size, config.hidden_size, placement)
        self.layers = nn.ModuleList(LlamaLayer(config, placement) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement)
        self.cos_sin = cos_sin_table(  # [max_position, D]
            config.rope, config.head_dim, config.max_position_embeddings, placement.device
        )

    def forward(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T] -> [T, E]."""
        x, residual = self.embed_tokens(token_ids), None  # [T, E]
        for layer, kv in zip(self.layers, context.kv_caches, strict=True):
            x, residual = layer(x, residual, self.cos_sin, kv, context)
        hidden: torch.Tensor = self.norm(x, residual)[0]
        return hidden


class Llama(CausalLM):
    """LlamaForCausalLM."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaBody(config, placement)
        if config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens
        else:
            self.lm_head = Vocabulary(config.vocab_size, config.hidden_size, placement)

    def forward(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T] -> [T, E]."""
        hidden: torch.Tensor = self.model(token_ids, context)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, E] -> [R, V]."""
        return self.lm_head.logits(hidden)
