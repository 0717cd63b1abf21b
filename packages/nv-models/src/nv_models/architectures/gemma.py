"""Gemma 2 (arXiv 2408.00118) and the text part of Gemma 3 (arXiv 2503.19786).

Norms multiply by 1 + weight in fp32, and each layer has four; llama.cpp's files hold 1 + weight.
"""

from dataclasses import replace

from nv_models.architectures.row import (
    FULL,
    SLIDING,
    Architecture,
    Values,
    every,
    gguf_layer_types,
    mixed,
    with_window,
)
from nv_models.config import Factors, LayerNorms, LayerSpec, NormKind
from nv_models.fields import number, optional_number, size, table
from nv_models.rope_parameters import rope_config


def attention(values: Values, layer: LayerSpec) -> LayerSpec:
    """The layer with the scale and the softcap that config.json names."""
    softcap = optional_number(values, "attn_logit_softcapping")
    scale = number(values, "query_pre_attn_scalar") ** -0.5
    return replace(layer, attention=replace(layer.attention, scale=scale, softcap=softcap))


def gemma2_layers(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """Every other layer has a window, the first one among them."""
    layer = attention(values, layer)
    usual = every(2, size(values, "num_hidden_layers"))
    return mixed(values, usual, with_window(values, layer), layer)


def gemma3_layers(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """Five layers with a window and a rope of their own, then one without."""
    layer = attention(values, layer)
    period = size(values, "sliding_window_pattern", 6)
    usual = every(period, size(values, "num_hidden_layers"))
    theta = values.get("rope_local_base_freq") or 10000.0
    nested = SLIDING in table(values, "rope_parameters")
    own = {} if nested else {"rope_parameters": None}
    rope = rope_config({**values, "rope_scaling": None, "rope_theta": theta, **own}, SLIDING)
    short = with_window(values, replace(layer, rope=rope))
    return mixed(values, usual, short, layer)


def factors(values: Values) -> Factors:
    """The embedding times the root of its size; logits capped."""
    softcap = optional_number(values, "final_logit_softcapping")
    return Factors(embedding=size(values, "hidden_size") ** 0.5, logit_softcap=softcap)


def gguf_scale(values: Values, largest: int) -> Values:
    """The scale, which llama.cpp does not write: D^-1/2, but for the largest model.

    Args:
        values: the other fields of config.json.
        largest: the number of layers by which llama.cpp knows that model. Its heads are not E / Hq
            wide, and its scale is (E / Hq)^-1/2 nevertheless.
    """
    is_largest = values["num_hidden_layers"] == largest
    part = values["hidden_size"] // values["num_attention_heads"]
    return {"query_pre_attn_scalar": part if is_largest else values["head_dim"]}


def gemma3_gguf(values: Values) -> Values:
    """The scale, and the kinds of layers: all are alike where the file has no window."""
    derived = {**gguf_scale(values, largest=62), **gguf_layer_types(values)}
    if values.get("sliding_window") is None:
        derived["layer_types"] = [FULL] * values["num_hidden_layers"]
    return derived


GEMMA2 = Architecture(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    activation="gelu_pytorch_tanh",
    activation_field="hidden_activation",
    norms=LayerNorms(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    norm_kind=NormKind(in_fp32=True, offset=1.0),
    layers=gemma2_layers,
    factors=factors,
    reads=frozenset(
        {"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "hidden_act"}
    ),
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    gguf="gemma2",
    gguf_fields={
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    gguf_derived=lambda values: gguf_scale(values, largest=46),
)
GEMMA3 = replace(
    GEMMA2,
    qk_norm=True,
    layers=gemma3_layers,
    reads=GEMMA2.reads | {"rope_local_base_freq"},
    defaults={
        **GEMMA2.defaults,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    gguf="gemma3",
    gguf_fields={
        "attention.sliding_window": "sliding_window",
        "attention.sliding_window_pattern": "sliding_window_pattern",
        "final_logit_softcapping": "final_logit_softcapping",
        "rope.freq_base_swa": "rope_local_base_freq",
    },
    gguf_derived=gemma3_gguf,
)
