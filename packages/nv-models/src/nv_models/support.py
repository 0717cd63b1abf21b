"""Keys of config.json that would change the numbers and are not read: refused by name.

Owns: which keys those are, and the values with which they change nothing. A key that is in no list
here, and whose name is not that of a factor, a cap or a part of the rope, is left alone: most keys
of a config.json are notes, and no list has them all.
Never: reads a key's meaning; that is `config`'s.
"""

import re
from collections.abc import Mapping
from typing import Any

KNOWN = {"ffn_dim_multiplier", "rope_parameters", "rope_scaling", "rope_theta"}
"""Of the keys that NUMBERS matches, those that `config` reads, and one that sizes follow from."""
NUMBERS = re.compile(
    r"(rope|rotary|mup|scale|logits?_scal).*|(?!init).*(multiplier|softcap|_scaling|_scale).*"
    r"|(attn|attention|query)_.*scal.*"
)
"""Names of keys that may change the numbers, whoever invented them; 1 changes nothing."""
FEATURES = {
    "alibi",
    "clip_qkv",
    "dim_model_base",
    "kv_lora_rank",
    "n_routed_experts",
    "no_rope_layers",
    "num_experts",
    "num_local_experts",
    "parallel_attn",
    "q_lora_rank",
    "qk_layernorm",
    "qkv_bias",
    "use_bidirectional_attention",
    "use_parallel_residual",
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


def refuse_unread(values: Mapping[str, Any], head_dim: int) -> None:
    """Raise ValueError for a key that would change the numbers and is not read.

    null, false, 0 and nothing switch a key off, but for `is_causal`.
    """
    usual = {"attention_multiplier": head_dim**-0.5, "query_pre_attn_scalar": head_dim}
    for key, value in values.items():
        is_factor = NUMBERS.fullmatch(key) and not is_same(value, usual.get(key, 1))
        is_factor = is_factor and key not in KNOWN
        if (value and (is_factor or key in FEATURES)) or (key == "is_causal" and value is False):
            raise ValueError(f"{key} is {value!r}, which is not supported")


def refuse_unread_rope(parameters: Mapping[str, Any]) -> None:
    """Raise ValueError for a parameter that this kind of rope does not read."""
    kind = parameters["rope_type"]
    known = ROPE_NOTES.union(ROPE.get(kind, parameters))  # other kinds are refused by name
    for key, value in parameters.items():
        if key in known or value is None or is_same(value, ROPE_NEUTRAL.get(key, 1)):
            continue
        raise ValueError(
            f"{key} {value!r} of the rope is not supported where its rope_type is {kind!r}"
        )


def is_same(value: object, neutral: object) -> bool:
    """Equality in which True is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
