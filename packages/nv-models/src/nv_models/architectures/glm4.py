"""GLM-4 (0414): four norms, fused gate and up, half of each head rotated in neighbouring pairs."""

from nv_models.architectures.row import Architecture
from nv_models.config import Fused, LayerNorms

GLM4 = Architecture(
    qkv_bias="attention_bias",
    norms=LayerNorms(
        after_attention="post_self_attn_layernorm",
        before_mlp="post_attention_layernorm",
        after_mlp="post_mlp_layernorm",
    ),
    fused=Fused(gate_up=True),
    rotates_neighbours=True,
    reads=frozenset({"partial_rotary_factor"}),
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 0.00000015625,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
    },
    gguf="glm4",
)
