"""A dense decoder: Qwen3 (arXiv 2505.09388), Llama (arXiv 2302.13971) and their kin, top to bottom.

A model embeds its tokens, runs its layers over one residual stream, norms, and multiplies by the
head. A layer is attention, then a feed-forward part, usually a gated MLP. Each reads the stream
through a norm and adds its result to the stream.

Module names are the checkpoint's. What differs between architectures stands in `architectures`.

Shapes: T tokens of a step, R rows that sample, E hidden size, H heads (Hq, Hkv), D head_dim,
V vocabulary.
"""

import nv_kernels as nk
import torch
from torch import nn

from nv_models.causal import CausalLM
from nv_models.config import LayerSpec, ModelConfig
from nv_models.context import ForwardContext
from nv_models.feed_forward import feed_forward
from nv_models.layers.embedding import Embedding, vocabulary_ends
from nv_models.layers.linear import ColumnLinear, Part, RowLinear
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
        normed = config.norms.after_attention is not None
        self.o_proj = RowLinear(width, size, config.output_bias, placement, is_normed=normed)
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
        plan = context.plans[self.spec.window]
        attended = context.backend.attend(q, kv, context.attention, plan, self.spec)
        return self.o_proj(attended.flatten(1), stream)


class DecoderLayer(nn.Module):
    """Attention, then a feed-forward part; each reads the stream through a norm of its own.

    What each adds to the stream may go through a norm too.
    """

    def __init__(self, config: ModelConfig, layer: LayerSpec, placement: Placement) -> None:
        super().__init__()
        names = config.norms

        def norm(name: str) -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, placement, name)

        self.before_attention_norm = norm(names.before_attention)
        self.self_attn = Attention(config, layer, placement)
        self.after_attention_norm = norm(names.after_attention) if names.after_attention else None
        self.before_mlp_norm = norm(names.before_mlp)
        self.mlp = feed_forward(config, layer, placement)
        self.after_mlp_norm = norm(names.after_mlp) if names.after_mlp else None

    def forward(
        self, stream: nk.Stream, cos_sin: torch.Tensor, kv: nk.KVCache, context: ForwardContext
    ) -> nk.Stream:
        """The stream before this layer -> after it."""
        stream = self.self_attn(stream, self.before_attention_norm, cos_sin, kv, context)
        if self.after_attention_norm:
            stream = nk.norm_pending(stream, self.after_attention_norm)
        stream = self.mlp(stream, self.before_mlp_norm)
        if self.after_mlp_norm:
            stream = nk.norm_pending(stream, self.after_mlp_norm)
        return stream


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
        embedding, head = vocabulary_ends(config, placement)
        self.model = DecoderBody(config, embedding, placement)
        self.lm_head = head

    def forward(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T] -> [T, E]."""
        return self.model(token_ids, context)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, E] -> [R, V] fp32."""
        assert self.lm_head is not None, "this model pools"
        return self.lm_head.logits(hidden)
