"""OLMo 2 (arXiv 2501.00656) and OLMo 3: norms after attention and MLP, none before them."""

from dataclasses import replace

from nv_models.architectures.row import (
    FULL,
    SLIDING,
    Architecture,
    Values,
    layer_types,
    with_window,
)
from nv_models.config import LayerNorms, LayerSpec, NormKind
from nv_models.fields import size
from nv_models.rope_parameters import rope_config


def olmo3_layers(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """Three layers with a window, then one without, whose rope may be scaled."""
    count = size(values, "num_hidden_layers")
    usual = [SLIDING if (index + 1) % 4 else FULL for index in range(count)]
    rope = rope_config({**values, "rope_scaling": None}, SLIDING)
    short = with_window(values, replace(layer, rope=rope))
    return tuple(short if kind == SLIDING else layer for kind in layer_types(values, usual))


OLMO2 = Architecture(
    qk_norm=True,
    qk_norm_whole=True,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    norms=LayerNorms(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    ),
    norm_kind=NormKind(in_fp32=True),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
    gguf="olmo2",
)
OLMO3 = replace(
    OLMO2,
    layers=olmo3_layers,
    defaults={**OLMO2.defaults, "sliding_window": 4096, "rope_theta": 500000.0},
    gguf=None,
)
