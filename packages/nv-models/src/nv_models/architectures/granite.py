"""Granite 3: Llama with factors on embedding, scores, residual additions and logits."""

from dataclasses import replace

from nv_models.architectures.row import Architecture, Values, alike
from nv_models.config import Factors, LayerSpec
from nv_models.fields import number


def layers(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """Scores have a factor of their own instead of D^-1/2."""
    scale = number(values, "attention_multiplier", 1.0)
    return alike(values, replace(layer, attention=replace(layer.attention, scale=scale)))


def factors(values: Values) -> Factors:
    """The factors by their names in config.json; `logits_scaling` divides."""
    return Factors(
        embedding=number(values, "embedding_multiplier", 1.0),
        residual=number(values, "residual_multiplier", 1.0),
        logits=1 / number(values, "logits_scaling", 1.0),
    )


GRANITE = Architecture(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
    layers=layers,
    factors=factors,
    reads=frozenset(
        {"attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"}
    ),
    defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    gguf="granite",
    gguf_rotates_neighbours=True,
    gguf_fields={
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
)
