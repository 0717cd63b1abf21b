"""OPT (arXiv 2205.01068): learned positions, layer norms, a plain MLP with ReLU."""

from dataclasses import replace

from nv_models.architectures.row import Architecture, Values, alike
from nv_models.config import Gated, LayerSpec, Plain
from nv_models.fields import flag, is_same, size

NORMAL = {
    "do_layer_norm_before": True,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
}
"""Switches, with the values of all checkpoints but that of 350 million parameters."""
SAME = {"word_embed_proj_dim": "hidden_size", "num_key_value_heads": "num_attention_heads"}
"""Sizes that must be another size: embeddings are not projected, and heads share no keys."""


def layers(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """Layers without a rotary embedding, with a plain MLP.

    Raises:
        ValueError: the norms of opt-350m, which come after attention and MLP, or its narrower
            embedding; or fewer heads of keys than of queries.
    """
    for name, usual in NORMAL.items():
        if flag({name: usual, **values}, name) != usual:
            raise ValueError(
                f"{name} is {values[name]}: only {usual} is supported; use another OPT"
            )
    for name, other in SAME.items():
        value, wanted = values.get(name), size(values, other)
        if value is not None and not is_same(value, wanted):
            raise ValueError(
                f"{name} is {value!r:.200}: it must be {other}, {wanted}; use another OPT"
            )
    gated = layer.feed_forward
    assert isinstance(gated, Gated)
    return alike(values, replace(layer, rope=None, feed_forward=Plain(gated.width, gated.bias)))


OPT = Architecture(
    model="nv_models.opt.OPT",
    qkv_bias="enable_bias",
    output_bias="enable_bias",
    mlp_bias="enable_bias",
    activation="relu",
    activation_field="activation_function",
    layers=layers,
    width_field="ffn_dim",
    defaults={
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "enable_bias": True,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 2,
    },
)
