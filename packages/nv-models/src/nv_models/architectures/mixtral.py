"""Mixtral (arXiv 2401.04088): Mistral whose layers have experts.

llama.cpp writes it as Llama with experts.
"""

from dataclasses import replace

from nv_models.architectures.mistral import MISTRAL
from nv_models.architectures.mixture import COUNTS, mixture
from nv_models.architectures.row import Values, windowed
from nv_models.config import ExpertNames, LayerSpec

NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2", width="intermediate_size")


def layers(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """Each layer has experts, and the window `sliding_window` unless that is null."""
    experts = mixture(values, NAMES, num_experts=8, top_k=2, is_normalised=True)
    return windowed(values, replace(layer, feed_forward=experts))


MIXTRAL = replace(
    MISTRAL,
    layers=layers,
    reads=frozenset(COUNTS),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    gguf="llama",
    gguf_rotates_neighbours=True,
    gguf_experts=NAMES,
    gguf_fields={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
)
