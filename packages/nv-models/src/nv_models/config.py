"""A model's sizes and constants, as frozen records.

Owns the records. Never reads a file: `read_config` makes them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import nv_kernels as nk
import torch

from nv_models.parallel import TensorParallel
from nv_models.rope import RopeConfig

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""The dtypes that a model is computed in, by name."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling values that generation_config.json recommends; None where it has none.

    They are numbers; the sampling parameters check their ranges.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class Gated:
    """A gated MLP: down(activation(gate(x)) * up(x)).

    Args:
        width: F, over all ranks.
        bias: gate, up and down have biases.
        activation: "silu", or "gelu_pytorch_tanh" (transformers' names).
    """

    width: int
    bias: bool = False
    activation: str = "silu"

    def parameters(self, hidden_size: int) -> int:
        """Weights of its products, over all ranks, that one token is multiplied by."""
        return 3 * hidden_size * self.width

    def split(self, parallel: TensorParallel) -> range:
        """This rank's part of the width; ValueError if the ranks do not divide it."""
        return parallel.split(self.width, "intermediate_size")


@dataclass(frozen=True)
class ExpertNames:
    """The names of a mixture of experts in the checkpoint.

    Args:
        module: the layer's module that holds router and experts.
        gate: a matrix of each expert, whose product goes through the activation.
        up: the matrix whose product is multiplied by that.
        down: the last matrix.
        width: the field of config.json that holds an expert's width.
        router: the router's module.
        is_stacked: the experts' matrices are two stacks, [E, K, 2F] and [E, F, K], of which the
            first alternates between gate and up, and so are their biases; the three names above
            are not used. Otherwise each expert has its own: `experts.N`.
        has_biases: the router and the experts' matrices have biases.
    """

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    width: str = "moe_intermediate_size"
    router: str = "gate"
    is_stacked: bool = False
    has_biases: bool = False


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts: each token goes through k of E gated MLPs, chosen by a router.

    Args:
        width: F of one expert, over all ranks.
        num_experts: E.
        top_k: k, from 1 to E.
        is_normalised: the weights of a token's experts sum to 1.
        names: in the checkpoint.
        gate: how an expert's gate and up become one.
    """

    width: int
    num_experts: int
    top_k: int
    is_normalised: bool
    names: ExpertNames = ExpertNames()
    gate: nk.Gate = nk.Gate()  # noqa: RUF009  # frozen

    @property
    def bias(self) -> bool:
        """The router and the experts' matrices have biases."""
        return self.names.has_biases

    def parameters(self, hidden_size: int) -> int:
        """Weights of its products, over all ranks, that one token is multiplied by."""
        return hidden_size * (self.num_experts + 3 * self.top_k * self.width)

    def split(self, parallel: TensorParallel) -> range:
        """This rank's part of each expert's width; ValueError if the ranks do not divide it."""
        return parallel.split(self.width, self.names.width)


@dataclass(frozen=True)
class Plain:
    """An MLP without a gate: down(relu(up(x))).

    Args:
        width: F, over all ranks.
        bias: both have biases.
        norms_after: the layer norms the sums after attention and MLP, not what these read.
    """

    width: int
    bias: bool = False
    norms_after: bool = False

    def parameters(self, hidden_size: int) -> int:
        """Weights of its products, over all ranks, that one token is multiplied by."""
        return 2 * hidden_size * self.width

    def split(self, parallel: TensorParallel) -> range:
        """This rank's part of the width; ValueError if the ranks do not divide it."""
        return parallel.split(self.width, "ffn_dim")


FeedForward = Gated | Mixture | Plain
"""The part of a layer after attention, a record for each kind; `feed_forward` has the classes."""


@dataclass(frozen=True)
class LayerNorms:
    """The norms of a layer by their names in the checkpoint; None: there is no such norm.

    Args:
        before_attention: of the residual stream.
        after_attention: of attention's output, before it is added to the stream.
        before_mlp: of the residual stream.
        after_mlp: of the MLP's output, before it is added to the stream.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class NormKind:
    """How the weight of an RMS norm multiplies.

    Args:
        in_fp32: it multiplies in fp32, and the product is rounded once; otherwise the normed
            values are rounded before it multiplies, too.
        offset: added to the weight in fp32: Gemma's norms multiply by 1 + weight.
    """

    in_fp32: bool = False
    offset: float = 0.0


@dataclass(frozen=True)
class Fused:
    """Matrices that are one tensor in the checkpoint: `qkv_proj`, and `gate_up_proj`."""

    qkv: bool = False
    gate_up: bool = False


@dataclass(frozen=True)
class Factors:
    """Factors of a decoder's two ends and of its residual stream.

    Args:
        embedding: multiplies the embedding; rounded to the model's dtype first.
        residual: multiplies what a layer adds to the stream.
        logits: multiplies the logits.
        logit_softcap: a logit becomes c * tanh(logit / c); None: it stays as it is.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    logit_softcap: float | None = None


@dataclass(frozen=True)
class LayerSpec:
    """The constants that may differ from layer to layer.

    Args:
        attention: how it attends.
        feed_forward: the part after attention.
        rope: the rotary embedding; None: queries and keys are not rotated.
    """

    attention: nk.AttentionSpec
    feed_forward: FeedForward
    rope: RopeConfig | None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's sizes and constants.

    Args:
        architecture: a name in the table of `architectures`.
        vocab_size: token ids are below it; also the columns of the logits.
        hidden_size: E.
        layers: the constants of each decoder layer, in order; each layer has a KV cache.
        num_q_heads: Hq over all ranks.
        num_kv_heads: Hkv over all ranks.
        head_dim: D.
        rms_norm_eps: added to the mean square.
        max_position_embeddings: the checkpoint's value of that name.
        max_length: the longest sequence: `max_position_embeddings`, or the length that a scaled
            rope makes of it (`RopeConfig.reach`). Of a loaded model: the length of its tables of
            angles.
        qk_norm: query and key heads are normed before their rotation.
        qk_norm_whole: that norm is over the heads together (OLMo 2).
        qkv_bias: q, k and v have biases.
        output_bias: attention's output has a bias.
        norms: the norms that each layer has.
        norm_kind: how their weights multiply.
        fused: matrices that are one tensor in the checkpoint.
        rotates_neighbours: the checkpoint's rotary embedding turns neighbouring elements of a head;
            rows are put in another order at load, and halves turn.
        factors: of embedding, residual and logits.
        embedding_size: columns of the vocabulary's tables, where they are not E: projections lie
            between these and the layers; 0: they are E.
        tie_word_embeddings: the head is the embedding.
        has_head: False if there are no logits: the model pools.
        eos_token_ids: any of them ends a sequence; may be empty. See `ends`.
        names_eos: False if the files name none: `eos_token_ids` is the architecture's default.
        bos_token_id: the id that begins a text, or None.
        dtype: of the checkpoint, or of a loaded model; None: the dtype of the weights' files.
        generation: recommended sampling values.
        length_place: which field of which of the user's files gives `max_length`, in errors.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    max_length: int
    qk_norm: bool = False
    qk_norm_whole: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    norms: LayerNorms = LayerNorms()
    norm_kind: NormKind = NormKind()
    fused: Fused = Fused()
    rotates_neighbours: bool = False
    factors: Factors = Factors()
    embedding_size: int = 0
    tie_word_embeddings: bool = False
    has_head: bool = True
    eos_token_ids: tuple[int, ...] = ()
    names_eos: bool = True
    bos_token_id: int | None = None
    dtype: torch.dtype | None = None
    generation: GenerationDefaults = GenerationDefaults()
    length_place: str = "its files"

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def num_trial_layers(self) -> int:
        """So many of the first layers launch every kernel of the model.

        What a layer launches depends on its constants and on those of the layer before it, so
        every such pair occurs among them.
        """
        pairs = list(zip((None, *self.layers), self.layers, strict=False))
        return 1 + max(pairs.index(pair) for pair in pairs)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of the layers: a step has an attention plan for each of them."""
        return tuple(dict.fromkeys(layer.attention.window for layer in self.layers))

    @property
    def attention_stays_pending(self) -> bool:
        """Whether a norm or a factor follows attention, before the residual addition."""
        return self.norms.after_attention is not None or self.factors.residual != 1

    @property
    def mlp_stays_pending(self) -> bool:
        """The same of the MLP."""
        return self.norms.after_mlp is not None or self.factors.residual != 1

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct rotary embeddings of the layers: a model has a table for each of them."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope))

    @property
    def layer_parameters(self) -> int:
        """Weights of the largest layer, over all ranks, by which a token is multiplied."""
        heads = 2 * self.num_q_heads + 2 * self.num_kv_heads
        attention = self.hidden_size * heads * self.head_dim
        return attention + max(
            layer.feed_forward.parameters(self.hidden_size) for layer in self.layers
        )

    def refuse_split(self, parallel: TensorParallel) -> None:
        """Raise ValueError if the ranks do not divide the heads or a feed-forward part."""
        parallel.split(self.num_q_heads, "num_attention_heads")
        parallel.split_kv_heads(self.num_kv_heads)
        for kind in {layer.feed_forward for layer in self.layers}:
            kind.split(parallel)

    def ends(self, tokenizer_eos: Iterable[int] = ()) -> tuple[int, ...]:
        """Every id that ends a sequence: those of the files, and those of the tokenizer.

        The architecture's default counts where neither names one.

        Args:
            tokenizer_eos: the tokenizer's own EOS; it may differ from what the files name, as
                fine-tunes often change the one and leave the others.

        Raises:
            ValueError: an id past the vocabulary.
        """
        for token in (more := tuple(tokenizer_eos)):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"the tokenizer's EOS has the id {token}, but the vocabulary is 0 .. "
                    f"{self.vocab_size - 1}: give the model's own tokenizer"
                )
        own = self.eos_token_ids if self.names_eos or not more else ()
        return tuple(dict.fromkeys((*own, *more)))
