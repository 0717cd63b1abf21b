"""Mistral (arXiv 2310.06825) and Ministral: Llama whose layers may have a window.

llama.cpp writes it as Llama.
"""

from dataclasses import replace

from nv_models.architectures.row import (
    SLIDING,
    Architecture,
    Values,
    alike,
    mixed,
    windowed,
    with_window,
)
from nv_models.config import LayerSpec
from nv_models.fields import size


def ministral_layers(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """A window for each layer that `layer_types` does not exempt."""
    if values.get("sliding_window") is None:
        return alike(values, layer)
    usual = [SLIDING] * size(values, "num_hidden_layers")
    return mixed(values, usual, with_window(values, layer), layer)


MISTRAL = Architecture(
    layers=windowed,
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
MINISTRAL = replace(MISTRAL, layers=ministral_layers)
