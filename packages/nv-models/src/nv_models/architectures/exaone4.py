"""EXAONE 4 (arXiv 2507.11407): norms after attention and MLP; in a hybrid only windows turn."""

from dataclasses import replace

from nv_models.architectures.row import (
    FULL,
    SLIDING,
    Architecture,
    Values,
    alike,
    layer_types,
    with_window,
)
from nv_models.config import LayerNorms, LayerSpec
from nv_models.fields import size


def layers(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """With a window, three layers have it, and the fourth reads all keys and is not rotated."""
    if values.get("sliding_window") is None:
        return alike(values, layer)
    period, count = size(values, "sliding_window_pattern", 4), size(values, "num_hidden_layers")
    usual = [SLIDING if (index + 1) % period else FULL for index in range(count)]
    short, whole = with_window(values, layer), replace(layer, rope=None)
    return tuple(short if kind == SLIDING else whole for kind in layer_types(values, usual))


EXAONE4 = Architecture(
    qk_norm=True,
    norms=LayerNorms(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    ),
    layers=layers,
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
)
