"""Llama (arXiv 2302.13971) and SmolLM2."""

from nv_models.architectures.row import Architecture

LLAMA = Architecture(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
    gguf="llama",
    gguf_rotates_neighbours=True,
    defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
)
