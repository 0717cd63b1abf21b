"""Qwen2 and 2.5 (arXiv 2412.15115): Llama with biases of q, k and v."""

from nv_models.architectures.row import Architecture, last_windowed

QWEN2 = Architecture(
    qkv_bias=True,
    layers=last_windowed,
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
    gguf="qwen2",
)
