"""SmolLM3: Llama that does not rotate every fourth layer (arXiv 2501.18795)."""

from dataclasses import replace

from nv_models.architectures.row import (
    FULL,
    SLIDING,
    Architecture,
    Values,
    layer_types,
    with_window,
)
from nv_models.config import LayerSpec
from nv_models.fields import flag, size


def layers(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """`no_rope_layers` has a 0 for each layer that is not rotated; only those may have a window."""
    count = size(values, "num_hidden_layers")
    interval = size(values, "no_rope_layer_interval", 4)
    turned = values.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(count)]
    if not isinstance(turned, list) or len(turned) != count or not set(turned) <= {0, 1}:
        raise ValueError(
            f"no_rope_layers is {turned!r:.200}: it must be a list of num_hidden_layers = {count} "
            "times 0 or 1"
        )
    is_windowed = flag(values, "use_sliding_window") and values.get("sliding_window")
    usual = [SLIDING if is_windowed and not turns else FULL for turns in turned]
    made = []
    for kind, turns in zip(layer_types(values, usual), turned, strict=True):
        each = with_window(values, layer) if kind == SLIDING else layer
        made.append(each if turns else replace(each, rope=None))
    return tuple(made)


SMOLLM3 = Architecture(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
    layers=layers,
    reads=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    gguf="smollm3",
    gguf_rotates_neighbours=True,
)
