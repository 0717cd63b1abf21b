"""A dense decoder: Qwen3 (arXiv 2505.09388), Llama (arXiv 2302.13971) and their kin, top to bottom.

A model embeds its tokens, runs its layers over one residual stream, norms, and multiplies by the
head. A layer is attention, then a gated MLP. Each reads the stream through a norm and adds its
result to the stream.

Module names are the checkpoint's. What differs between architectures stands in `architectures`.

Shapes: T tokens of a step, R rows that sample, E hidden size, H heads (Hq, Hkv), D head_dim,
F width of the MLP, V vocabulary.
"""

import nv_kernels as nk
import torch
from torch import nn

from nv_models.causal import CausalLM
from nv_models.config import LayerSpec, ModelConfig
from nv_models.context import ForwardContext
from nv_models.layers.embedding import Embedding, Head, TiedEmbedding
from nv_models.layers.linear import ColumnLinear, GatedLinear, Part, RowLinear
from nv_models.layers.norm import RMSNorm
from nv_models.placement import Placement
from nv_models.rope import cos_sin_table


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) over a paged KV cache."""

    def __init__(self, config: ModelConfig, layer: LayerSpec, placement: Placement) -> None:
        super().__init__()
        parallel, dim = placement.parallel, config.head_dim
        q_heads = parallel.split(config.num_q_heads, "num_attention_heads")
        kv_heads = parallel.split_kv_heads(config.num_kv_heads)
        stacked = (
            Part("q_proj", config.num_q_heads, q_heads, dim),
            Part("k_proj", config.num_kv_heads, kv_heads, dim),
            Part("v_proj", config.num_kv_heads, kv_heads, dim),
        )
        size, width = config.hidden_size, config.num_q_heads * dim
        self.qkv_proj = ColumnLinear(size, stacked, config.qkv_bias, placement)
        self.o_proj = RowLinear(width, size, config.output_bias, placement)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, placement) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, placement) if config.qk_norm else None
        self.eps = config.rms_norm_eps
        self.num_q_heads = len(q_heads)
        self.spec = layer.attention

    def forward(
        self,
        stream: nk.Stream,
        norm: RMSNorm,
        cos_sin: torch.Tensor,
        kv: nk.KVCache,
        context: ForwardContext,
    ) -> nk.Stream:
        """The stream before attention -> after it; `kv` then holds this step's keys and values."""
        qkv, stream = self.qkv_proj(stream, norm)  # [T, (Hq + 2 Hkv) D], or its partials
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
        attended = context.backend.attend(q, kv, context.attention, context.plan, self.spec)
        return self.o_proj(attended.flatten(1), stream)


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        size, width = config.hidden_size, config.intermediate_size
        kept = placement.parallel.split(width, "intermediate_size")
        gate_up = Part("gate_proj", width, kept), Part("up_proj", width, kept)
        self.gate_up_proj = GatedLinear(size, gate_up, config.mlp_bias, placement)
        self.down_proj = RowLinear(width, size, config.mlp_bias, placement)

    def forward(self, stream: nk.Stream, norm: RMSNorm) -> nk.Stream:
        """The stream before the MLP -> after it."""
        gated, stream = self.gate_up_proj(stream, norm)  # [T, F]
        return self.down_proj(gated, stream)


class DecoderLayer(nn.Module):
    """Attention, then a gated MLP; each reads the stream through a norm of its own."""

    def __init__(self, config: ModelConfig, layer: LayerSpec, placement: Placement) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, placement)
        self.self_attn = Attention(config, layer, placement)
        self.post_attention_layernorm = RMSNorm(size, eps, placement)
        self.mlp = GatedMLP(config, placement)

    def forward(
        self, stream: nk.Stream, cos_sin: torch.Tensor, kv: nk.KVCache, context: ForwardContext
    ) -> nk.Stream:
        """The stream before this layer -> after it."""
        stream = self.self_attn(stream, self.input_layernorm, cos_sin, kv, context)
        return self.mlp(stream, self.post_attention_layernorm)


class DecoderBody(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, config: ModelConfig, embedding: Embedding, placement: Placement) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, placement) for layer in config.layers
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
        hidden, _ = self.norm(stream)
        return hidden


class Decoder(CausalLM):
    """The body, and the head that turns its hidden states into logits."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        self.config = config
        sizes = config.vocab_size, config.hidden_size
        head = (TiedEmbedding if config.tie_word_embeddings else Head)(*sizes, placement)
        embedding = head if isinstance(head, TiedEmbedding) else Embedding(*sizes, placement)
        self.model = DecoderBody(config, embedding, placement)
        self.lm_head = head

    def forward(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T] -> [T, E]."""
        return self.model(token_ids, context)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, E] -> [R, V] fp32."""
        return self.lm_head.logits(hidden)
