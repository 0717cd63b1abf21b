"""A dense decoder, read aloud: what Qwen3 and Llama have in common, which is nearly all.

Read from the bottom up: a model is a body, and a vocabulary that turns its output into logits. The
body embeds, runs its layers over one residual stream, and norms. A layer attends, then thinks. What
a layer adds to the stream is left pending until the next norm reads it, so that one launch adds
and norms (`nv_kernels.linear.chain`).

Shapes: T tokens of a step, R rows that sample, E hidden size, D head_dim, V vocabulary.
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


class DecoderLayer(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, config: ModelConfig, placement: Placement, qk_norm: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, placement)
        self.self_attn = Attention(config, placement, qk_norm)
        self.post_attention_layernorm = RMSNorm(size, eps, placement)
        self.mlp = GatedMLP(config, placement)
        self.batch_invariant = placement.batch_invariant
        self.reduce = placement.parallel.layer_sum(placement.batch_invariant)
        self.weights: nk.LayerWeights | None = None

    def gather(self) -> nk.LayerWeights:
        """The layer's matrices and norms in one record, as they are now."""
        attention, mlp = self.self_attn, self.mlp
        return nk.LayerWeights(
            attention_norm=self.input_layernorm.weight,
            qkv=attention.qkv_proj.weight,
            output=attention.o_proj.weight,
            mlp_norm=self.post_attention_layernorm.weight,
            gate_up=mlp.gate_up_proj.weight,
            down=mlp.down_proj.weight,
            eps=self.input_layernorm.eps,
            qkv_bias=attention.qkv_proj.bias,
            output_bias=attention.o_proj.own_bias,
            gate_up_bias=mlp.gate_up_proj.bias,
            down_bias=mlp.down_proj.own_bias,
            batch_invariant=self.batch_invariant,
        )

    def forward(
        self, stream: nk.Stream, cos_sin: torch.Tensor, kv: nk.KVCache, context: ForwardContext
    ) -> nk.Stream:
        """The stream before this layer -> after it; this step's K and V are in `kv` afterwards."""
        if self.weights is None:  # they are where they stay once the model is loaded
            self.weights = self.gather()
        qkv, stream = nk.attention_input(self.weights, stream)  # [T, (Hq + 2 Hkv) D]
        attended = self.self_attn(qkv, cos_sin, kv, context)  # [T, Hq D]
        return nk.attention_output(self.weights, attended, stream, self.reduce)


class DecoderBody(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, config: ModelConfig, placement: Placement, qk_norm: bool) -> None:
        super().__init__()
        self.embed_tokens = Vocabulary(config.vocab_size, config.hidden_size, placement)
        self.layers = nn.ModuleList(
            DecoderLayer(config, placement, qk_norm) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement)
        self.cos_sin = cos_sin_table(  # [max_position, D]
            config.rope, config.head_dim, config.max_length, placement.device
        )

    def forward(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T] -> [T, E]."""
        stream = self.embed_tokens(token_ids)
        for layer, kv in zip(self.layers, context.kv_caches, strict=True):
            stream = layer(stream, self.cos_sin, kv, context)
        return nk.normalise(stream, self.norm.weight, self.norm.eps)[0]


class Decoder(CausalLM):
    """A decoder whose subclass says whether query and key heads are normed."""

    qk_norm: bool

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderBody(config, placement, self.qk_norm)
        if config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens
        else:
            self.lm_head = Vocabulary(config.vocab_size, config.hidden_size, placement)

    def forward(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T] -> [T, E]."""
        hidden: torch.Tensor = self.model(token_ids, context)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, E] -> [R, V] fp32."""
        return self.lm_head.logits(hidden)
