"""OPT (Zhang et al. 2022, arXiv 2205.01068): learned positions, layer norms, a plain MLP.

A model embeds its tokens and their positions, runs its layers over one residual stream, norms, and
multiplies by the head. Module names are the checkpoint's.

Shapes: T tokens of a step, R rows that sample, E hidden size, H heads, D head_dim, V vocabulary.
"""

from collections.abc import Iterator

import nv_kernels as nk
import torch
from torch import nn
from torch.nn import functional

from nv_models.causal import CausalLM
from nv_models.config import LayerSpec, ModelConfig, Plain
from nv_models.context import ForwardContext
from nv_models.layers.embedding import Embedding, vocabulary_ends
from nv_models.layers.layer import Layer
from nv_models.layers.linear import ColumnLinear, Part, RowLinear
from nv_models.parts import Parts, whole
from nv_models.placement import Placement
from nv_models.shard import Shard

OFFSET = 2
"""The first rows of the table of positions, which no token uses."""


class LayerNorm(Layer):
    """Layer norm (Ba et al. 2016, arXiv 1607.06450); weights are whole on every rank."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.weight, self.bias = placement.empty(size), placement.empty(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        return functional.layer_norm(x, x.shape[1:], self.weight, self.bias, self.eps)

    def shards(self, name: str) -> Iterator[Shard]:
        """The whole weight, and the whole bias."""
        for each, values in (("weight", self.weight), ("bias", self.bias)):
            yield Shard(values, f"{name}.{each}", tuple(values.shape))


class Positions(Layer):
    """A row of E numbers per position, whole on every rank."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(config.max_position_embeddings + OFFSET, config.hidden_size)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, E]."""
        return nk.embedding(positions + OFFSET, self.weight)

    def shards(self, name: str) -> Iterator[Shard]:
        """The whole table."""
        yield Shard(self.weight, f"{name}.weight", tuple(self.weight.shape))


class Attention(Layer):
    """Multi-head attention without a rotary embedding, over a paged KV cache."""

    def __init__(self, config: ModelConfig, layer: LayerSpec, placement: Placement) -> None:
        super().__init__()
        heads, dim = config.num_q_heads, config.head_dim
        kept = placement.parallel.split(heads, "num_attention_heads")
        parts = [Part(name, heads, kept, dim) for name in ("q_proj", "k_proj", "v_proj")]
        self.qkv_proj = ColumnLinear(config.hidden_size, parts, config.qkv_bias, placement)
        self.out_proj = RowLinear(heads * dim, config.hidden_size, config.output_bias, placement)
        self.num_heads = len(kept)
        self.spec = layer.attention

    def forward(
        self,
        normed: torch.Tensor,
        stream: nk.Stream,
        kv: nk.KVCache,
        context: ForwardContext,
    ) -> nk.Stream:
        """The stream before attention -> after it; `normed` [T, E] is its layer norm."""
        q = nk.qk_norm_rope_store(
            self.qkv_proj.product(context.lora).partials(normed, self.qkv_proj.bias),
            None,
            None,
            1.0,
            context.positions,
            None,
            kv,
            context.slot_mapping,
            self.num_heads,
            normed.dtype,
        )  # [T, H, D]
        plan = context.plans[self.spec.window]
        attended = context.backend.attend(q, kv, context.attention, plan, self.spec)
        return self.out_proj(attended.flatten(1), stream, context.lora)


class DecoderLayer(Layer):
    """Attention, then a plain MLP; each reads a layer norm of the stream, or is before one."""

    def __init__(self, config: ModelConfig, layer: LayerSpec, placement: Placement) -> None:
        super().__init__()
        size, eps, mlp = config.hidden_size, config.rms_norm_eps, layer.feed_forward
        self.self_attn_layer_norm = LayerNorm(size, eps, placement)
        self.self_attn = Attention(config, layer, placement)
        self.final_layer_norm = LayerNorm(size, eps, placement)
        assert isinstance(mlp, Plain)
        part = Part("fc1", mlp.width, mlp.split(placement.parallel))
        self.fc1 = ColumnLinear(size, [part], mlp.bias, placement)
        self.fc2 = RowLinear(mlp.width, size, mlp.bias, placement)
        self.norms_after = mlp.norms_after

    def forward(self, stream: nk.Stream, kv: nk.KVCache, context: ForwardContext) -> nk.Stream:
        """The stream before this layer -> after it."""
        stream = nk.add_pending(stream)
        if self.norms_after:
            stream = self.self_attn(stream.hidden, stream, kv, context)
            normed = self.self_attn_layer_norm(nk.add_pending(stream).hidden)
            stream = nk.add_pending(self._mlp(normed, nk.Stream(normed), context))
            return nk.Stream(self.final_layer_norm(stream.hidden))
        normed = self.self_attn_layer_norm(stream.hidden)
        stream = nk.add_pending(self.self_attn(normed, stream, kv, context))
        return self._mlp(self.final_layer_norm(stream.hidden), stream, context)

    def _mlp(self, x: torch.Tensor, stream: nk.Stream, context: ForwardContext) -> nk.Stream:
        """The stream with the MLP of x [T, E] added."""
        product = self.fc1.product(context.lora).linear(x, self.fc1.bias)
        return self.fc2(functional.relu(product), stream, context.lora)  # [T, F] -> [T, E]


def projection(name: str, rows: int, columns: int, placement: Placement) -> ColumnLinear:
    """A matrix [rows, columns] that lies whole on every rank."""
    return ColumnLinear(columns, [Part(name, rows, range(rows))], bias=False, placement=placement)


class OPTDecoder(Layer):
    """Token ids to hidden states.

    Attributes:
        project_in: from the columns of the embedding to E; None: they are E.
        project_out: from E to them, before the head.
        final_layer_norm: None where each layer ends with a norm.
    """

    def __init__(self, config: ModelConfig, embedding: Embedding, placement: Placement) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.embed_positions = Positions(config, placement)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, placement) for layer in config.layers
        )
        size, columns = config.hidden_size, config.embedding_size
        self.project_in = projection("project_in", size, columns, placement) if columns else None
        self.project_out = projection("project_out", columns, size, placement) if columns else None
        mlp = config.layers[-1].feed_forward
        ends_normed = isinstance(mlp, Plain) and mlp.norms_after
        norm = None if ends_normed else LayerNorm(size, config.rms_norm_eps, placement)
        self.final_layer_norm = norm

    def in_parts(self, token_ids: torch.Tensor, context: ForwardContext) -> Parts[torch.Tensor]:
        """[T] -> [T, E], a layer at a time."""
        stream = self.embed_tokens(token_ids, context.lora_of_ends)
        if self.project_in is not None:
            product = self.project_in.product(context.lora)
            stream = nk.Stream(product.linear(nk.add_pending(stream).hidden))
        stream = stream._replace(hidden=stream.hidden + self.embed_positions(context.positions))
        for layer, kv in zip(self.layers, context.kv_caches, strict=False):
            stream = layer(stream, kv, context)
            yield
        hidden = nk.add_pending(stream).hidden
        return hidden if self.final_layer_norm is None else self.final_layer_norm(hidden)


class OPT(CausalLM):
    """The decoder, and the head that turns its hidden states into logits."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        self.config = config
        embedding, head = vocabulary_ends(config, placement)
        self.model = nn.ModuleDict({"decoder": OPTDecoder(config, embedding, placement)})
        self.lm_head = head

    def forward(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T] -> [T, E]."""
        return whole(self.in_parts(token_ids, context))

    def in_parts(self, token_ids: torch.Tensor, context: ForwardContext) -> Parts[torch.Tensor]:
        """See `CausalLM.in_parts`."""
        decoder = self.model["decoder"]
        assert isinstance(decoder, OPTDecoder)
        return decoder.in_parts(token_ids, context)

    def logits(self, hidden: torch.Tensor, lora: nk.LoraPlan | None = None) -> torch.Tensor:
        """[R, E] -> [R, V] fp32."""
        assert self.lm_head is not None, "this model pools"
        decoder = self.model["decoder"]
        assert isinstance(decoder, OPTDecoder)
        if decoder.project_out is not None:
            hidden = decoder.project_out.product(lora).linear(hidden)  # [R, embedding's columns]
        return self.lm_head.logits(hidden, lora)
