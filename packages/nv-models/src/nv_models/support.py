"""Models that are refused: what of a config.json would change the numbers and is not computed.

Owns the features that are not supported, the keys that are not read, and the values with which a
key changes nothing. A key that is in no list here, and whose name is not that of a factor, a cap or
a part of the rope, is left alone: most keys of a config.json are notes, and no list has them all.
Never keeps a value: `read_config` does.
"""

import re
from collections.abc import Mapping
from typing import Any

from nv_models.architectures import Architecture
from nv_models.fields import is_same, size

NARROW = re.compile(r"(torch\.)?(float|u?int)[48](_.*)?")
"""Names of dtypes that only quantized weights have."""
KNOWN = {"ffn_dim_multiplier", "rope_parameters", "rope_scaling", "rope_theta"}
"""Of the keys that NUMBERS matches, those that `read_config` reads, and one that sizes follow."""
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
"""Keys that switch something on which is not built, unless the architecture's row reads it."""


def refuse_narrow(raw: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for a dtype that no model is computed in."""
    for name in ("dtype", "torch_dtype"):
        if NARROW.fullmatch(str(raw.get(name))):
            raise NotImplementedError(
                f"{name} is {raw[name]}, in which no model is computed: pass "
                'hf_overrides={"dtype": "bfloat16"} if the weights are quantized as '
                "quantization_config describes, or use the unquantized checkpoint"
            )


def refuse_unsupported(values: Mapping[str, Any], row: Architecture) -> None:
    """Raise ValueError for a feature that would silently be computed wrong."""
    name = row.activation_field
    if (activation := values.get(name, row.activation)) != row.activation:
        raise ValueError(
            f"{name} {activation!r} is not supported; only {row.activation!r} is, in this "
            "architecture"
        )
    num_q_heads = size(values, "num_attention_heads")
    num_kv_heads = size(values, "num_key_value_heads", num_q_heads)
    hidden_size = size(values, "hidden_size")
    if values.get("head_dim") is None and hidden_size % num_q_heads:
        raise ValueError(
            f"num_attention_heads {num_q_heads} does not divide hidden_size {hidden_size}, and "
            "there is no head_dim: correct the file, or download it again"
        )
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads {num_q_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}: correct the file, or download it again"
        )


def refuse_unread(values: Mapping[str, Any], row: Architecture, head_dim: int) -> None:
    """Raise ValueError for a key that would change the numbers and is not read.

    A key that is null, false or 0 is off, except `is_causal`. So is a key whose value names the
    computation of the architecture.
    """
    usual: dict[str, object] = {
        "attention_multiplier": head_dim**-0.5,
        "query_pre_attn_scalar": head_dim,
        "qk_norm": row.qk_norm,
        "use_qk_norm": row.qk_norm,
        **dict.fromkeys(ACTIVATIONS, row.activation),
    }
    for key, value in values.items():
        if key in row.reads:
            continue
        is_factor = NUMBERS.fullmatch(key) and key not in KNOWN
        neutral = usual.get(key, 1 if is_factor else False)
        is_on = value and (is_factor or key in FEATURES) and not is_same(value, neutral)
        if is_on or (key == "is_causal" and value is False):
            raise ValueError(f"{key} is {value!r:.200}, which is not supported")
