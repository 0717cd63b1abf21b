"""Qwen3 (arXiv 2505.09388): Llama with norms of the heads of q and k."""

from nv_models.architectures.row import Architecture, last_windowed

QWEN3 = Architecture(
    qk_norm=True,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    layers=last_windowed,
    defaults={"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    gguf="qwen3",
)
