"""Qwen3-MoE (arXiv 2505.09388): Qwen3 whose layers have experts."""

from dataclasses import replace

from nv_models.architectures.mixture import COUNTS, mixture
from nv_models.architectures.qwen3 import QWEN3
from nv_models.architectures.row import Values, alike, windowed
from nv_models.config import ExpertNames, LayerSpec
from nv_models.fields import flag, indices, size


def layers(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """Every `decoder_sparse_step`-th layer has experts, but for those in `mlp_only_layers`.

    A window that `use_sliding_window` turns on is that of all layers.
    """
    if flag(values, "use_sliding_window"):
        found = windowed({"sliding_window": 4096, **values}, layer)
    else:
        found = alike(values, layer)
    if any(values.get(name) == 0 for name in COUNTS):
        return found
    experts = mixture(
        values,
        ExpertNames(),
        num_experts=128,
        top_k=8,
        is_normalised=flag(values, "norm_topk_prob"),
        width=768,
    )
    step, dense = size(values, "decoder_sparse_step", 1), indices(values, "mlp_only_layers")
    return tuple(
        each if index in dense or (index + 1) % step else replace(each, feed_forward=experts)
        for index, each in enumerate(found)
    )


QWEN3_MOE = replace(
    QWEN3,
    layers=layers,
    reads=frozenset(COUNTS),
    defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768},
    gguf="qwen3moe",
    gguf_experts=ExpertNames(),
    gguf_fields={
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    gguf_derived=lambda _: {"norm_topk_prob": True},  # llama.cpp divides the weights by their sum
)
