"""GPT-OSS (arXiv 2508.10925): experts with biases, sinks, and a window in every other layer.

llama.cpp's files have three tensors for the experts of a layer, which are read expert by expert.
"""

from dataclasses import replace

import nv_kernels as nk

from nv_models.architectures.mixture import COUNTS, mixture
from nv_models.architectures.row import Architecture, Values, every, mixed, with_window
from nv_models.config import ExpertNames, LayerSpec, NormKind
from nv_models.fields import flag, number, size

NAMES = ExpertNames(router="router", width="intermediate_size", is_stacked=True, has_biases=True)
GGUF_NAMES = replace(NAMES, is_stacked=False)
IS_STACKED = "experts_are_stacked"
"""A field of nv's own: false in the config.json that is made of a GGUF file."""
ALPHA, SHIFT = 1.702, 1.0
"""Of the experts' gate; transformers fixes both, and the limit, which files name."""


def layers(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """Each layer has sinks and experts, and every other one a window, the first one among them."""
    gate = nk.Gate(ALPHA, number(values, "swiglu_limit", 7.0), SHIFT)
    names = NAMES if flag({IS_STACKED: True, **values}, IS_STACKED) else GGUF_NAMES
    experts = mixture(values, names, num_experts=128, top_k=4, is_normalised=True)
    layer = replace(
        layer,
        attention=replace(layer.attention, sinks=True),
        feed_forward=replace(experts, gate=gate),
    )
    usual = every(2, size(values, "num_hidden_layers"))
    return mixed(values, usual, with_window(values, layer), layer)


def gguf_derived(values: Values) -> Values:
    """What llama.cpp does not write: that yarn's range is not rounded to whole dimensions."""
    rope = values["rope_parameters"]
    own = {"truncate": False} if rope["rope_type"] == "yarn" else {}
    return {IS_STACKED: False, "rope_parameters": {**rope, **own}}


GPT_OSS = Architecture(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    norm_kind=NormKind(in_fp32=True),
    layers=layers,
    reads=frozenset(COUNTS),
    quantization="mxfp4",
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "rope_theta": 150000.0,
        "sliding_window": 128,
    },
    gguf="gpt-oss",
    gguf_experts=GGUF_NAMES,
    gguf_layers={
        "attn_sinks": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
    },
    gguf_fields={
        "attention.sliding_window": "sliding_window",
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
    },
    gguf_derived=gguf_derived,
)
