"""The reading of a rotary embedding from config.json, in both spellings.

Owns the parameters that each kind of rope reads; another one that would change the numbers is
refused. Never computes an angle.
"""

from collections.abc import Mapping
from typing import Any

from nv_models.fields import is_same, numbers, size, table
from nv_models.rope import RopeConfig, rope_kind

ROPE = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""The parameters that each kind of rope reads besides ROPE_NOTES."""
ROPE_NOTES = {
    "finetuned",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "type",
}
ROPE_NEUTRAL = {"beta_fast": 32, "high_freq_factor": 4, "truncate": True}
"""The value with which a key changes nothing; for any other key that is 1."""


def rope_config(values: Mapping[str, Any], layer_type: str = "full_attention") -> RopeConfig:
    """The rotary embedding, from `rope_parameters` (version 5) or `rope_theta` and `rope_scaling`.

    The order of precedence is transformers' `convert_rope_params_to_dict`.

    Args:
        values: the fields of config.json.
        layer_type: of the layers, where `rope_parameters` has an entry for each type.
    """
    given = table(values, "rope_scaling") or table(values, "rope_parameters")
    if {"full_attention", "sliding_attention"} & given.keys():
        given = table(given, layer_type)
    longest = size(values, "max_position_embeddings")
    parameters: dict[str, Any] = {
        "rope_type": given.get("type", "default"),
        "rope_theta": values.get("rope_theta", 10000.0),
        "partial_rotary_factor": values.get("partial_rotary_factor") or 1.0,
        "original_max_position_embeddings": longest,
        **given,
    }
    if values.get("original_max_position_embeddings"):
        parameters |= numbers(values, ("original_max_position_embeddings",))
    if parameters["rope_type"] == "su":  # longrope's name in the first files of Phi-3
        parameters["rope_type"] = "longrope"
    if parameters["rope_type"] in ("yarn", "longrope") and parameters.get("factor") is None:
        parameters["factor"] = longest / size(parameters, "original_max_position_embeddings")
    refuse_unread_rope(parameters)
    return RopeConfig.from_parameters(parameters)


def refuse_unread_rope(parameters: Mapping[str, Any]) -> None:
    """Raise ValueError for a parameter that this kind of rope does not read."""
    kind = rope_kind(parameters)
    known = ROPE_NOTES.union(ROPE[kind])
    for key, value in parameters.items():
        if key in known or value is None or is_same(value, ROPE_NEUTRAL.get(key, 1)):
            continue
        raise ValueError(
            f"{key} {value!r:.200} of the rope is not supported where its rope_type is {kind!r}"
        )
