"""EXAONE 4 (arXiv 2507.11407): norms after attention and MLP; in a hybrid only windows turn."""

from dataclasses import replace

from nv_models.architectures.row import (
    AFTER_ONLY,
    Architecture,
    Values,
    alike,
    every,
    gguf_layer_types,
    mixed,
    with_window,
)
from nv_models.config import LayerSpec
from nv_models.fields import size


def layers(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """With a window, three layers have it, and the fourth reads all keys and is not rotated."""
    if values.get("sliding_window") is None:
        return alike(values, layer)
    usual = every(period(values), size(values, "num_hidden_layers"))
    return mixed(values, usual, with_window(values, layer), replace(layer, rope=None))


def period(values: Values) -> int:
    """The number of layers after which their kinds repeat, given as a number or as "LLLG"."""
    pattern = values.get("sliding_window_pattern")
    if not isinstance(pattern, str):
        return size(values, "sliding_window_pattern", 4)
    if not pattern.endswith("G") or set(pattern[:-1]) - {"L"}:
        raise ValueError(
            f"sliding_window_pattern is {pattern!r:.200}: it must be a positive integer, or an L "
            'for each layer with a window and a G at the end, such as "LLLG"'
        )
    return len(pattern)


def gguf_windows(values: Values) -> Values:
    """The windows of a GGUF file: without a key for them, only EXAONE-4.0-32B has some."""
    usual = 4096 if values["num_hidden_layers"] == 64 else None
    return {"sliding_window": values.get("sliding_window") or usual, **gguf_layer_types(values)}


EXAONE4 = Architecture(
    qk_norm=True,
    norms=AFTER_ONLY,
    layers=layers,
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    gguf="exaone4",
    gguf_fields={
        "attention.sliding_window": "sliding_window",
        "attention.sliding_window_pattern": "sliding_window_pattern",
    },
    gguf_derived=gguf_windows,
)
