"""config.json from a GGUF file's metadata.

Owns: the translation of keys, and the rope of Llama 3, which GGUF keeps as a tensor.
Never: reads a weight.
"""

import numpy as np
import torch

from nv_models.checkpoint.gguf.header import Header, Value
from nv_models.checkpoint.gguf.tensors import ROPE_FACTORS, float_dtype
from nv_models.rope import RopeConfig, frequencies

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_json(header: Header) -> dict[str, Value]:
    """What config.json would say.

    Raises:
        ValueError: an architecture or a rope that is not supported, or a size that is not there.
    """
    if header.architecture not in ARCHITECTURES:
        raise ValueError(
            f"{header.file} holds the architecture {header.architecture!r}, which is not "
            f"supported; supported in GGUF files are {', '.join(ARCHITECTURES)}"
        )
    vocab_size, hidden_size = size_of(header, "token_embd.weight")
    num_heads = required(header, "attention.head_count")
    head_dim = optional(header, "attention.key_length", hidden_size // num_heads)
    return {
        "architectures": [ARCHITECTURES[header.architecture]],
        "model_type": header.architecture,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": required(header, "feed_forward_length"),
        "num_hidden_layers": required(header, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": optional(header, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": required(header, "attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": required(header, "context_length"),
        "rope_parameters": rope_parameters(header, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_token_ids(header),
        "dtype": str(float_dtype(header)).removeprefix("torch."),
    }


def optional(header: Header, key: str, default: Value) -> Value:
    """A value of the architecture's own section."""
    return header.metadata.get(f"{header.architecture}.{key}", default)


def required(header: Header, key: str) -> Value:
    """The same, where there is no default."""
    value = optional(header, key, None)
    if value is None:
        raise ValueError(f"{header.file} lacks the metadata {header.architecture}.{key}")
    return value


def size_of(header: Header, name: str) -> tuple[int, ...]:
    """A tensor's shape."""
    if name not in header.tensors:
        raise ValueError(f"{header.file} lacks the tensor {name}")
    return header.tensors[name].shape


def eos_token_ids(header: Header) -> list[int]:
    """End of text and end of turn, where they differ."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = [header.metadata[key] for key in keys if key in header.metadata]
    return list(dict.fromkeys(ids))


def rope_parameters(header: Header, head_dim: int) -> dict[str, Value]:
    """The rotary embedding under transformers' names."""
    rotated = optional(header, "rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(f"{header.file} rotates {rotated} of {head_dim} dimensions of a head")
    base = {"rope_theta": optional(header, "rope.freq_base", 10000.0)}
    kind = optional(header, "rope.scaling.type", "none")
    if ROPE_FACTORS in header.tensors:
        return base | llama3_parameters(header, head_dim, base["rope_theta"])
    if kind == "none":
        return base | {"rope_type": "default"}
    scaled = base | {"rope_type": kind, "factor": required(header, "rope.scaling.factor")}
    if kind == "yarn":
        context = required(header, "rope.scaling.original_context_length")
        scaled["original_max_position_embeddings"] = context
    elif kind != "linear":
        raise ValueError(f"{header.file} scales its rope by {kind!r}, which is not supported")
    return scaled


def llama3_parameters(header: Header, head_dim: int, theta: float) -> dict[str, Value]:
    """The parameters behind the tensor of divisors that llama.cpp computed from them.

    All of Llama 3.1 to 3.3 share everything but the factor, which is the largest divisor.
    """
    offset = header.tensors[ROPE_FACTORS].offset
    stored = np.fromfile(header.file, np.float32, head_dim // 2, offset=offset)
    parameters = {"rope_type": "llama3", "factor": float(stored.max()), **LLAMA3}
    plain, _ = frequencies(RopeConfig(theta), head_dim)
    scaled, _ = frequencies(
        RopeConfig.from_parameters({"rope_theta": theta, **parameters}), head_dim
    )
    if not torch.allclose(plain / scaled, torch.from_numpy(stored), rtol=1e-3):
        raise ValueError(f"{header.file} has rope factors that are not Llama 3's; not supported")
    return parameters
