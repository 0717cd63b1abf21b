"""GPT-OSS (arXiv 2508.10925): experts with biases, sinks, and a window in every other layer."""

from dataclasses import replace

import nv_kernels as nk

from nv_models.architectures.mixture import COUNTS, mixture
from nv_models.architectures.row import Architecture, Values, every, mixed, with_window
from nv_models.config import ExpertNames, LayerSpec, NormKind
from nv_models.fields import number, size

NAMES = ExpertNames(router="router", width="intermediate_size", is_stacked=True)
ALPHA, SHIFT = 1.702, 1.0
"""Of the experts' gate; transformers fixes both, and the limit, which files name."""


def layers(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """Each layer has sinks and experts, and every other one a window, the first one among them."""
    gate = nk.Gate(ALPHA, number(values, "swiglu_limit", 7.0), SHIFT)
    experts = mixture(values, NAMES, num_experts=128, top_k=4, is_normalised=True)
    layer = replace(
        layer,
        attention=replace(layer.attention, sinks=True),
        feed_forward=replace(experts, bias=True, gate=gate),
    )
    usual = every(2, size(values, "num_hidden_layers"))
    return mixed(values, usual, with_window(values, layer), layer)


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
)
