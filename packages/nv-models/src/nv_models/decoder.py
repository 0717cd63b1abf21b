"""A dense decoder: Qwen3 (arXiv 2505.09388), Llama (arXiv 2302.13971) and their kin, top to bottom.

A model embeds its tokens, runs its layers over one residual stream, norms, and multiplies by the
head. A layer is attention, then a feed-forward part, usually a gated MLP. Each reads the stream
through a norm and adds its result to the stream.

Module names are the checkpoint's. What differs between architectures stands in `architectures`.

Shapes: T tokens of a step, R rows that sample, E hidden size, H heads (Hq, Hkv), D head_dim,
V vocabulary.
"""

from collections.abc import Iterator

import nv_kernels as nk
import torch
from torch import nn

from nv_models.causal import CausalLM
from nv_models.config import LayerSpec, ModelConfig
from nv_models.context import ForwardContext
from nv_models.feed_forward import feed_forward
from nv_models.layers.embedding import Embedding, vocabulary_ends
from nv_models.layers.kv_scales import KVScales
from nv_models.layers.layer import Layer
from nv_models.layers.linear import ColumnLinear, Part, RowLinear, side_by_side
from nv_models.layers.norm import ProjectionNorm, RMSNorm
from nv_models.parts import Parts, whole
from nv_models.placement import Placement
from nv_models.rope import cos_sin_table
from nv_models.shard import Shard


class Attention(Layer):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) over a paged KV cache."""

    def __init__(self, config: ModelConfig, layer: LayerSpec, placement: Placement) -> None:
        super().__init__()
        parallel, dim = placement.parallel, config.head_dim
        q_heads = parallel.split(config.num_q_heads, "num_attention_heads")
        kv_heads = parallel.split_kv_heads(config.num_kv_heads)
        pairs = layer.rope.rotated(dim) if layer.rope and config.rotates_neighbours else 0
        stacked: tuple[Part, ...] = (
            Part("q_proj", config.num_q_heads, q_heads, dim, pairs=pairs),
            Part("k_proj", config.num_kv_heads, kv_heads, dim, pairs=pairs),
            Part("v_proj", config.num_kv_heads, kv_heads, dim),
        )
        if config.fused.qkv:
            stacked = side_by_side("qkv_proj", stacked)
        size, width = config.hidden_size, config.num_q_heads * dim
        self.qkv_proj = ColumnLinear(size, stacked, config.qkv_bias, placement)
        self.o_proj = RowLinear(
            width,
            size,
            config.output_bias,
            placement,
            stays_pending=config.attention_stays_pending,
        )
        self.q_norm = head_norm(config, config.num_q_heads, q_heads, placement)
        self.k_norm = head_norm(config, config.num_kv_heads, kv_heads, placement)
        self.eps = config.rms_norm_eps
        self.q_heads = q_heads
        self.spec = layer.attention
        scheme = placement.scheme
        self.kv_scales = KVScales(scheme, placement) if scheme and scheme.has_kv_scales else None
        self.sinks = placement.empty(len(q_heads)) if layer.attention.sinks else None
        self.all_q_heads = config.num_q_heads

    def forward(
        self,
        stream: nk.Stream,
        norm: RMSNorm | None,
        cos_sin: torch.Tensor | None,
        kv: nk.KVCache,
        context: ForwardContext,
    ) -> nk.Stream:
        """The stream before attention -> after it; `kv` then holds this step's keys and values."""
        # [T, (Hq + 2 Hkv) D], or its partials
        qkv, stream = self._projected(stream, norm, context.lora)
        q = nk.qk_norm_rope_store(
            qkv,
            self.q_norm.weight if isinstance(self.q_norm, RMSNorm) else None,
            self.k_norm.weight if isinstance(self.k_norm, RMSNorm) else None,
            self.eps,
            context.positions,
            cos_sin,
            kv,
            context.slot_mapping,
            len(self.q_heads),
            stream.hidden.dtype,
        )  # [T, Hq, D]
        plan = context.plans[self.spec.window]
        attended = context.backend.attend(
            q, kv, context.attention, plan, self.spec, sinks=self.sinks
        )
        return self.o_proj(attended.flatten(1), stream, context.lora)

    def _projected(
        self, stream: nk.Stream, norm: RMSNorm | None, lora: nk.LoraPlan | None
    ) -> tuple[torch.Tensor, nk.Stream]:
        """Queries, keys and values; a norm over all heads of q, and of k, is applied here."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if not isinstance(q_norm, ProjectionNorm) or not isinstance(k_norm, ProjectionNorm):
            return self.qkv_proj(stream, norm, lora)
        qkv, stream = self.qkv_proj.whole(stream, norm, lora)
        q, k, v = torch.split(qkv, [part.rows for part in self.qkv_proj.parts], dim=1)
        return torch.cat((q_norm(q), k_norm(k), v), dim=1), stream

    def shards(self, name: str) -> Iterator[Shard]:
        """The sinks of this rank's heads, if there are any."""
        if self.sinks is not None:
            yield Shard(self.sinks, f"{name}.sinks", (self.all_q_heads,), 0, self.q_heads.start)


def head_norm(
    config: ModelConfig, heads: int, kept: range, placement: Placement
) -> RMSNorm | ProjectionNorm | None:
    """The norm of the heads of q or of k, if the architecture has one."""
    dim, eps, kind = config.head_dim, config.rms_norm_eps, config.norm_kind
    if not config.qk_norm:
        return None
    if config.qk_norm_whole:
        return ProjectionNorm(heads, kept, dim, eps, placement, kind=kind)
    return RMSNorm(dim, eps, placement, kind=kind)


class DecoderLayer(Layer):
    """Attention, then a feed-forward part; each reads the stream through a norm of its own.

    What each adds to the stream may go through a norm too.
    """

    def __init__(self, config: ModelConfig, layer: LayerSpec, placement: Placement) -> None:
        super().__init__()
        names = config.norms

        def norm(name: str | None) -> RMSNorm | None:
            if name is None:
                return None
            size, eps, kind = config.hidden_size, config.rms_norm_eps, config.norm_kind
            return RMSNorm(size, eps, placement, kind=kind, source=name)

        self.residual_factor = config.factors.residual
        self.before_attention_norm = norm(names.before_attention)
        self.self_attn = Attention(config, layer, placement)
        self.after_attention_norm = norm(names.after_attention)
        self.before_mlp_norm = norm(names.before_mlp)
        self.mlp = feed_forward(config, layer, placement)
        self.after_mlp_norm = norm(names.after_mlp)

    def forward(
        self,
        stream: nk.Stream,
        cos_sin: torch.Tensor | None,
        kv: nk.KVCache,
        context: ForwardContext,
    ) -> nk.Stream:
        """The stream before this layer -> after it."""
        stream = self.self_attn(stream, self.before_attention_norm, cos_sin, kv, context)
        stream = self._joined(stream, self.after_attention_norm)
        stream = self.mlp(stream, self.before_mlp_norm, context.lora)
        return self._joined(stream, self.after_mlp_norm)

    def _joined(self, stream: nk.Stream, norm: RMSNorm | None) -> nk.Stream:
        """Norm and scale what is pending, where the architecture does."""
        if norm:
            stream = nk.norm_pending(stream, norm)
        if self.residual_factor != 1:
            stream = nk.scale_pending(stream, self.residual_factor)
        return stream


class DecoderBody(Layer):
    """Token ids to hidden states."""

    def __init__(self, config: ModelConfig, embedding: Embedding, placement: Placement) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, placement) for layer in config.layers
        )
        self.ropes = [layer.rope for layer in config.layers]
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, placement, kind=config.norm_kind
        )
        self.cos_sin = {  # [max_position, R] each
            rope: cos_sin_table(rope, config.head_dim, config.max_length, placement.device)
            for rope in config.ropes
        }

    def in_parts(self, token_ids: torch.Tensor, context: ForwardContext) -> Parts[torch.Tensor]:
        """[T] -> [T, E], a layer at a time."""
        stream = self.embed_tokens(token_ids, context.lora_of_ends)
        for layer, rope, kv in zip(self.layers, self.ropes, context.kv_caches, strict=False):
            stream = layer(stream, self.cos_sin[rope] if rope else None, kv, context)
            yield
        hidden: torch.Tensor = self.norm(stream)[0]
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
        return whole(self.in_parts(token_ids, context))

    def in_parts(self, token_ids: torch.Tensor, context: ForwardContext) -> Parts[torch.Tensor]:
        """See `CausalLM.in_parts`."""
        return self.model.in_parts(token_ids, context)

    def logits(self, hidden: torch.Tensor, lora: nk.LoraPlan | None = None) -> torch.Tensor:
        """[R, E] -> [R, V] fp32."""
        assert self.lm_head is not None, "this model pools"
        factors, logits = self.config.factors, self.lm_head.logits(hidden, lora)
        if factors.logits != 1:
            logits = logits * factors.logits
        if cap := factors.logit_softcap:
            logits = cap * torch.tanh(logits / cap)
        return logits
