"""Phi-3 (arXiv 2404.14219), Phi-4 and Phi-4-mini: fused tensors; may rotate a part of a head."""

from nv_models.architectures.row import Architecture, windowed
from nv_models.config import Fused

PHI3 = Architecture(
    fused=Fused(qkv=True, gate_up=True),
    layers=windowed,
    reads=frozenset({"partial_rotary_factor"}),
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    },
    gguf="phi3",
    gguf_fields={
        "attention.sliding_window": "sliding_window",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
    },
    gguf_derived=lambda values: {"sliding_window": values.get("sliding_window") or None},
)
