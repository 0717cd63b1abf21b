"""config.json from a GGUF file's metadata.

Owns the translation of keys, and the rope of Llama 3, which GGUF keeps as a tensor. Never reads a
weight.
"""

import numpy as np
import torch

from nv_models.architectures import ARCHITECTURES, Architecture
from nv_models.checkpoint.gguf.architecture import architecture_of
from nv_models.checkpoint.gguf.ends import end_ids
from nv_models.checkpoint.gguf.header import AGAIN, Header, Value
from nv_models.checkpoint.gguf.section import Section
from nv_models.checkpoint.gguf.support import (
    MLP,
    OUTPUT,
    QKV,
    has_biases,
    refuse_keys,
    refuse_tensors,
)
from nv_models.checkpoint.gguf.tensors import (
    LONG_FACTORS,
    ROPE_FACTORS,
    ROPE_TENSORS,
    SHORT_FACTORS,
    expert_names,
    float_dtype,
    names_of,
)
from nv_models.rope import USUAL_RANGE, RopeConfig, frequencies, yarn_attention_factor

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_json(header: Header) -> dict[str, Value]:
    """The fields that config.json would have.

    Raises:
        ValueError: an architecture, a rope, a key or a tensor that is not supported, or metadata
            that is not there or of another type.
    """
    architecture = architecture_of(header)
    sizes = Section(header, header.architecture)
    vocab_size, hidden_size = matrix_shape(header, EMBEDDING)
    refuse_other_head(header)
    num_heads = sizes.size("attention.head_count")
    refuse_other_width(sizes, hidden_size, num_heads)
    head_dim = sizes.size("attention.key_length", hidden_size // num_heads)
    row = ARCHITECTURES[architecture]
    refuse_keys(sizes, head_dim, row.gguf_fields.keys())
    biased = biased_groups(row)
    refuse_tensors(header, known_layers(row), biased)
    tokens = Section(header, "tokenizer.ggml")
    own = {field: sizes.value(key) for key, field in row.gguf_fields.items()}
    config = {
        "architectures": [architecture],
        "model_type": header.architecture,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": sizes.size("feed_forward_length"),
        "num_hidden_layers": sizes.size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": sizes.size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        row.activation_field: row.activation,
        "rms_norm_eps": sizes.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": sizes.size("context_length"),
        "rope_parameters": rotated_part(sizes, head_dim, row) | rope_parameters(sizes, head_dim),
        "attention_bias": has_biases(header, biased[0]),
        "mlp_bias": has_biases(header, biased[1]),
        "tie_word_embeddings": HEAD not in header.tensors,
        "bos_token_id": tokens.index("bos_token_id", vocab_size),
        "eos_token_id": end_ids(tokens, vocab_size),
        "dtype": str(float_dtype(header)).removeprefix("torch."),
        **{field: value for field, value in own.items() if value is not None},
    }
    return {**config, **row.gguf_derived(config)}


def known_layers(row: Architecture) -> set[str]:
    """The names of an architecture's layers in GGUF files."""
    factors = ROPE_TENSORS.get(str(row.gguf), set())
    return set(names_of(row)) | {name.removesuffix(".weight") for name in factors}


def biased_groups(row: Architecture) -> tuple[tuple[str, ...], ...]:
    """The matrices of attention, the MLP and experts that may have biases: all of a group or none.

    Attention and the MLP are the first two groups.
    """
    attention = (QKV if row.qkv_bias else ()) + (OUTPUT if row.output_bias else ())
    names = row.gguf_experts
    experts = tuple(expert_names(names)) if names and names.has_biases else ()
    return attention, MLP if row.mlp_bias else (), experts


def matrix_shape(header: Header, name: str) -> tuple[int, int]:
    """A matrix's rows and columns."""
    if name not in header.tensors:
        raise ValueError(f"{header.file} lacks the tensor {name}")
    shape = header.tensors[name].shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"{header.file}: {name} has shape {list(shape)}: it must be a matrix; {AGAIN}"
        )
    return shape[0], shape[1]


def refuse_other_width(sizes: Section, hidden_size: int, num_heads: int) -> None:
    """Raise ValueError for a width unlike the embedding's, or that the heads do not divide."""
    width = sizes.size("embedding_length", hidden_size)
    if width != hidden_size:
        raise sizes.error("embedding_length", width, f"{hidden_size}, the columns of {EMBEDDING}")
    if sizes.value("attention.key_length") is None and hidden_size % (2 * num_heads):
        raise sizes.error(
            "attention.head_count",
            num_heads,
            f"a number of heads of an equal, even length in {sizes.name}.embedding_length, "
            f"{hidden_size}, where there is no {sizes.name}.attention.key_length",
        )


def refuse_other_head(header: Header) -> None:
    """Raise ValueError for a head whose shape is not the embedding's."""
    expected = header.tensors[EMBEDDING].shape
    head = header.tensors.get(HEAD)
    if head and head.shape != expected:
        raise ValueError(
            f"{head.file}: {HEAD} has shape {list(head.shape)}: it must have that of {EMBEDDING}, "
            f"{list(expected)}; {AGAIN}"
        )


def rotated_part(sizes: Section, head_dim: int, row: Architecture) -> dict[str, Value]:
    """The part of a head that is rotated, where it is not the whole.

    Raises:
        ValueError: it is a part, and the architecture always rotates the whole.
    """
    rotated = sizes.size("rope.dimension_count", head_dim)
    if rotated == head_dim:
        return {}
    if "partial_rotary_factor" not in row.reads:
        raise ValueError(
            f"{sizes.header.file}: {sizes.name}.rope.dimension_count is {rotated}, so that a part "
            f"of a head's {head_dim} dimensions is rotated, which is not supported"
        )
    return {"partial_rotary_factor": rotated / head_dim}


def rope_parameters(sizes: Section, head_dim: int) -> dict[str, Value]:
    """The rotary embedding under transformers' names, read as llama.cpp reads it.

    A factor without a type is linear, and `rope.scale_linear` is an older name of the factor.
    """
    header = sizes.header
    theta = sizes.number("rope.freq_base", 10000.0)
    if LONG_FACTORS in header.tensors or SHORT_FACTORS in header.tensors:
        return {"rope_theta": theta, **longrope_parameters(sizes, head_dim)}
    kind = sizes.text("rope.scaling.type", "linear")
    if kind not in {"none", "linear", "yarn"}:
        raise ValueError(f"{header.file} scales its rope by {kind!r}, which is not supported")
    attention = sizes.number("rope.scaling.attn_factor", 1.0)
    if attention != 1 and kind != "yarn":
        raise ValueError(
            f"{header.file}: {sizes.name}.rope.scaling.attn_factor is {attention:g} and the rope's "
            f"scaling is {kind!r}, which is not supported together"
        )
    factor = 1.0 if kind == "none" else scaling_factor(sizes)
    if ROPE_FACTORS in header.tensors:
        if factor != 1:
            raise ValueError(
                f"{header.file} scales its rope twice, by {ROPE_FACTORS} and by "
                f"{sizes.name}.rope.scaling.factor {factor:g}, which is not supported"
            )
        return {"rope_theta": theta, **llama3_parameters(header, head_dim, theta)}
    if kind == "yarn":
        return yarn_parameters(sizes, theta, factor, attention)
    if factor == 1:
        return {"rope_theta": theta, "rope_type": "default"}
    return {"rope_theta": theta, "rope_type": "linear", "factor": factor}


def scaling_factor(sizes: Section) -> float:
    """By how much positions are divided; 1 where the file names nothing, and for 0."""
    older = sizes.value("rope.scale_linear")
    key = "rope.scaling.factor"
    if older is not None and sizes.value(key) is None:
        key = "rope.scale_linear"
    if sizes.value(key) == 0:
        return 1.0
    return sizes.number(key, None if sizes.value("rope.scaling.type") else 1.0)


def yarn_parameters(
    sizes: Section, theta: float, factor: float, attention: float
) -> dict[str, Value]:
    """YaRN's parameters; `attention` multiplies the temperature that follows from the factor."""
    if theta <= 1:
        raise sizes.error("rope.freq_base", theta, "more than 1 with yarn")
    context = sizes.size("rope.scaling.original_context_length", sizes.size("context_length"))
    return {
        "rope_theta": theta,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": context,
        "attention_factor": attention * yarn_attention_factor(RopeConfig(theta, factor=factor)),
    }


def longrope_parameters(sizes: Section, head_dim: int) -> dict[str, Value]:
    """LongRoPE's two lists of divisors, and the factor that llama.cpp's converter computed."""
    kind = sizes.text("rope.scaling.type", "longrope")
    if kind not in {"none", "longrope"} or scaling_factor(sizes) != 1:
        raise ValueError(
            f"{sizes.header.file} scales its rope twice, by {LONG_FACTORS} and by "
            f"{sizes.name}.rope.scaling, which is not supported"
        )
    original = sizes.size("rope.scaling.original_context_length")
    count = sizes.size("rope.dimension_count", head_dim) // 2
    return {
        "rope_type": "longrope",
        "short_factor": divisors(sizes.header, SHORT_FACTORS, count).tolist(),
        "long_factor": divisors(sizes.header, LONG_FACTORS, count).tolist(),
        "original_max_position_embeddings": original,
        "factor": sizes.size("context_length") / original,
        "attention_factor": sizes.number("rope.scaling.attn_factor", 1.0),
    }


def divisors(header: Header, name: str, count: int) -> np.ndarray:
    """A tensor of `count` divisors of the rope's frequencies, fp32.

    Raises:
        ValueError: it is missing, of another shape or type, or has a value below 1 or too large.
    """
    if name not in header.tensors:
        raise ValueError(f"{header.file} lacks the tensor {name}; {AGAIN}")
    info = header.tensors[name]
    if (info.kind, info.shape) != (0, (count,)):  # 0: fp32
        raise ValueError(
            f"{info.file}: {name} has shape {list(info.shape)} and type {info.kind}: it must be "
            f"{count} values of fp32 (type 0); {AGAIN}"
        )
    stored = np.fromfile(info.file, np.float32, count, offset=info.offset)
    if len(stored) < count:
        raise ValueError(f"{info.file} is truncated: {name} ends early; {AGAIN}")
    least, largest = float(stored.min()), float(stored.max())
    if not 0.99 < least <= largest <= USUAL_RANGE[1]:  # and not NaN
        raise ValueError(
            f"{info.file}: {name} has divisors from {least:g} to {largest:g}: each must be a "
            f"number from 1 to {USUAL_RANGE[1]:.10g}; {AGAIN}"
        )
    return stored


def llama3_parameters(header: Header, head_dim: int, theta: float) -> dict[str, Value]:
    """The parameters from which llama.cpp computed the tensor of divisors.

    All of Llama 3.1 to 3.3 share everything but the factor, which is the largest divisor.
    """
    stored = divisors(header, ROPE_FACTORS, head_dim // 2)
    parameters = {"rope_type": "llama3", "factor": float(stored.max()), **LLAMA3}
    plain, _ = frequencies(RopeConfig(theta), head_dim)
    scaled, _ = frequencies(
        RopeConfig.from_parameters({"rope_theta": theta, **parameters}), head_dim
    )
    if not torch.allclose(plain / scaled, torch.from_numpy(stored), rtol=1e-3):
        raise ValueError(f"{header.file} has rope factors that are not Llama 3's; not supported")
    return parameters
