"""OPT (arXiv 2205.01068): learned positions, layer norms, a plain MLP with ReLU."""

from dataclasses import replace

from nv_models.architectures.row import Architecture, Values, alike
from nv_models.config import Gated, LayerSpec, Plain
from nv_models.fields import flag, is_same, size

NORMAL = {"layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False}
"""Switches, with the values of all published checkpoints."""


def layers(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """Layers without a rotary embedding, with a plain MLP; opt-350m's norms come after both.

    Raises:
        ValueError: norms without weights, no norm after the last layer, or fewer heads of keys than
            of queries.
    """
    for name, usual in NORMAL.items():
        if flag({name: usual, **values}, name) != usual:
            raise ValueError(
                f"{name} is {values[name]}: only {usual} is supported; use another OPT"
            )
    value, wanted = values.get("num_key_value_heads"), size(values, "num_attention_heads")
    if value is not None and not is_same(value, wanted):
        raise ValueError(
            f"num_key_value_heads is {value!r:.200}: it must be num_attention_heads, {wanted}; use "
            "another OPT"
        )
    gated, before = layer.feed_forward, "do_layer_norm_before"
    assert isinstance(gated, Gated)
    mlp = Plain(gated.width, gated.bias, norms_after=not flag({before: True, **values}, before))
    return alike(values, replace(layer, rope=None, feed_forward=mlp))


OPT = Architecture(
    model="nv_models.opt.OPT",
    qkv_bias="enable_bias",
    output_bias="enable_bias",
    mlp_bias="enable_bias",
    activation="relu",
    activation_field="activation_function",
    layers=layers,
    width_field="ffn_dim",
    embedding_field="word_embed_proj_dim",
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
