"""config.json from a GGUF file's metadata.

Owns: the translation of keys, and the rope of Llama 3, which GGUF keeps as a tensor.
Never: reads a weight.
"""

import numpy as np
import torch

from nv_models.checkpoint.gguf.ends import end_ids
from nv_models.checkpoint.gguf.header import Header, Value
from nv_models.checkpoint.gguf.section import AGAIN, Section
from nv_models.checkpoint.gguf.tensors import ROPE_FACTORS, float_dtype
from nv_models.rope import RopeConfig, frequencies

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_json(header: Header) -> dict[str, Value]:
    """What config.json would say.

    Raises:
        ValueError: an architecture or a rope that is not supported, or metadata that is not there
            or of another type.
    """
    if header.architecture not in ARCHITECTURES:
        raise ValueError(
            f"{header.file} holds the architecture {header.architecture!r}, which is not "
            f"supported; supported in GGUF files are {', '.join(ARCHITECTURES)}"
        )
    sizes = Section(header, header.architecture)
    vocab_size, hidden_size = matrix_shape(header, "token_embd.weight")
    num_heads = sizes.size("attention.head_count")
    head_dim = sizes.size("attention.key_length", hidden_size // num_heads)
    tokens = Section(header, "tokenizer.ggml")
    return {
        "architectures": [ARCHITECTURES[header.architecture]],
        "model_type": header.architecture,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": sizes.size("feed_forward_length"),
        "num_hidden_layers": sizes.size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": sizes.size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": sizes.size("context_length"),
        "rope_parameters": rope_parameters(sizes, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": tokens.index("bos_token_id", vocab_size),
        "eos_token_id": end_ids(tokens, vocab_size),
        "dtype": str(float_dtype(header)).removeprefix("torch."),
    }


def matrix_shape(header: Header, name: str) -> tuple[int, int]:
    """A matrix's rows and columns."""
    if name not in header.tensors:
        raise ValueError(f"{header.file} lacks the tensor {name}")
    shape = header.tensors[name].shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"{header.file}: {name} has shape {list(shape)}, but must be a matrix; {AGAIN}"
        )
    return shape[0], shape[1]


def rope_parameters(sizes: Section, head_dim: int) -> dict[str, Value]:
    """The rotary embedding under transformers' names."""
    header = sizes.header
    rotated = sizes.size("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(f"{header.file} rotates {rotated} of {head_dim} dimensions of a head")
    theta = sizes.number("rope.freq_base", 10000.0)
    kind = sizes.text("rope.scaling.type", "none")
    if ROPE_FACTORS in header.tensors:
        return {"rope_theta": theta, **llama3_parameters(header, head_dim, theta)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    if kind not in {"linear", "yarn"}:
        raise ValueError(f"{header.file} scales its rope by {kind!r}, which is not supported")
    factor = sizes.number("rope.scaling.factor")
    scaled = {"rope_theta": theta, "rope_type": kind, "factor": factor}
    if kind == "yarn":
        if theta <= 1:
            raise sizes.error("rope.freq_base", theta, "more than 1 with yarn")
        context = sizes.size("rope.scaling.original_context_length")
        scaled["original_max_position_embeddings"] = context
    return scaled


def llama3_parameters(header: Header, head_dim: int, theta: float) -> dict[str, Value]:
    """The parameters behind the tensor of divisors that llama.cpp computed from them.

    All of Llama 3.1 to 3.3 share everything but the factor, which is the largest divisor.
    """
    offset = header.tensors[ROPE_FACTORS].offset
    stored = np.fromfile(header.file, np.float32, head_dim // 2, offset=offset)
    if len(stored) < head_dim // 2:
        raise ValueError(f"{header.file} is truncated: {ROPE_FACTORS} ends early; {AGAIN}")
    parameters = {"rope_type": "llama3", "factor": float(stored.max()), **LLAMA3}
    plain, _ = frequencies(RopeConfig(theta), head_dim)
    scaled, _ = frequencies(
        RopeConfig.from_parameters({"rope_theta": theta, **parameters}), head_dim
    )
    if not torch.allclose(plain / scaled, torch.from_numpy(stored), rtol=1e-3):
        raise ValueError(f"{header.file} has rope factors that are not Llama 3's; not supported")
    return parameters
