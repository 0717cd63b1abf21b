"""Keys of config.json that would change the numbers and are not read: refused by name.

Owns: which keys those are, and the values with which they change nothing. A key that is in no list
here, and whose name is not that of a factor, a cap or a part of the rope, is left alone: most keys
of a config.json are notes, and no list has them all.
Never: reads a key's meaning; that is `config`'s.
"""

import re
from collections.abc import Mapping
from typing import Any

from nv_models.architectures import Architecture

KNOWN = {"ffn_dim_multiplier", "rope_parameters", "rope_scaling", "rope_theta"}
"""Of the keys that NUMBERS matches, those that `config` reads, and one that sizes follow from."""
NUMBERS = re.compile(
    r"(rope|rotary|mup|scale|logits?_scal).*|(?!init).*(multiplier|softcap|_scaling|_scale).*"
    r"|(attn|attention|query)_.*scal.*"
)
"""Names of keys, known or not, that may change the numbers; the value 1 changes nothing."""
ACTIVATIONS = {
    "activation_function",
    "hidden_activation",
    "mlp_act",
    "mlp_hidden_act",
}
"""Other names of `hidden_act`."""
FEATURES = ACTIVATIONS | {
    "add_cross_attention",
    "alibi",
    "attention_chunk_size",
    "attention_sinks",
    "attn_output_gate",
    "attn_temperature_tuning",
    "clip_qkv",
    "dim_model_base",
    "is_encoder_decoder",
    "kv_lora_rank",
    "lm_head_bias",
    "n_routed_experts",
    "no_rope_layer_interval",
    "no_rope_layers",
    "num_experts",
    "num_local_experts",
    "parallel_attn",
    "post_norm",
    "q_lora_rank",
    "qk_layernorm",
    "qk_norm",
    "qkv_bias",
    "rms_norm_add_unit_offset",
    "sandwich_norm",
    "use_attention_sinks",
    "use_bidirectional_attention",
    "use_parallel_residual",
    "use_post_norm",
    "use_qk_norm",
}
"""Keys that switch something on which is not built."""
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
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""What each kind of rope reads besides ROPE_NOTES."""
ROPE_NOTES = {
    "finetuned",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "type",
}
ROPE_NEUTRAL = {"beta_fast": 32, "high_freq_factor": 4, "truncate": True}
"""What a key holds where it changes nothing; any other key 1."""


def refuse_unread(values: Mapping[str, Any], row: Architecture, head_dim: int) -> None:
    """Raise ValueError for a key that would change the numbers and is not read.

    null, false, 0 and nothing switch a key off, but for `is_causal`. So does the value that says
    what the architecture computes.
    """
    usual: dict[str, object] = {
        "attention_multiplier": head_dim**-0.5,
        "query_pre_attn_scalar": head_dim,
        "qk_norm": row.qk_norm,
        "use_qk_norm": row.qk_norm,
        **dict.fromkeys(ACTIVATIONS, "silu"),
    }
    for key, value in values.items():
        is_factor = NUMBERS.fullmatch(key) and key not in KNOWN
        neutral = usual.get(key, 1 if is_factor else False)
        is_on = value and (is_factor or key in FEATURES) and not is_same(value, neutral)
        if is_on or (key == "is_causal" and value is False):
            raise ValueError(f"{key} is {value!r:.200}, which is not supported")


def refuse_unread_rope(parameters: Mapping[str, Any]) -> None:
    """Raise ValueError for a parameter that this kind of rope does not read."""
    kind = parameters["rope_type"]
    known = ROPE_NOTES.union(ROPE.get(kind, parameters))  # other kinds are refused by name
    for key, value in parameters.items():
        if key in known or value is None or is_same(value, ROPE_NEUTRAL.get(key, 1)):
            continue
        raise ValueError(
            f"{key} {value!r:.200} of the rope is not supported where its rope_type is {kind!r}"
        )


def is_same(value: object, neutral: object) -> bool:
    """Equality in which True is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
