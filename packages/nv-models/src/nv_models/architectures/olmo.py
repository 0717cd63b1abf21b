"""OLMo 2 (arXiv 2501.00656) and OLMo 3: norms after attention and MLP, none before them."""

from dataclasses import replace

from nv_models.architectures.row import (
    AFTER_ONLY,
    SLIDING,
    Architecture,
    Values,
    every,
    mixed,
    with_window,
)
from nv_models.config import LayerSpec, NormKind
from nv_models.fields import size
from nv_models.rope_parameters import rope_config


def olmo3_layers(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """Three layers with a window, then one without, whose rope may be scaled."""
    usual = every(4, size(values, "num_hidden_layers"))
    rope = rope_config({**values, "rope_scaling": None}, SLIDING)
    short = with_window(values, replace(layer, rope=rope))
    return mixed(values, usual, short, layer)


OLMO2 = Architecture(
    qk_norm=True,
    qk_norm_whole=True,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    norms=AFTER_ONLY,
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
