"""GGUF files that are refused: keys and tensors that would change the numbers and are not computed.

Owns the keys of an architecture's section that would change the numbers (llama.cpp's list of keys,
gguf-py/gguf/constants.py), and the tensors that a model has a place for. Never keeps a value:
`metadata` does.
"""

import re
from collections.abc import Collection, Sequence

from nv_models.checkpoint.gguf.header import Header
from nv_models.checkpoint.gguf.section import Section, shown
from nv_models.listing import first_few

READ = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
}
"""Of the keys that NUMBERS matches, those that `metadata` reads."""
WITHOUT_EFFECT = {
    "attention.layer_norm_epsilon",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
}
"""Keys that llama.cpp reads for other architectures only, or for messages."""
NEUTRAL = {"attention.causal": True, "use_parallel_residual": False}
"""Values with which a key changes nothing; for any other key that is 0."""
FACTORS = {"embedding_scale", "logit_scale", "residual_scale"}
"""Keys that change nothing with 1 either."""
NUMBERS = re.compile(
    r"(rope|attention|ssm|wkv|altup|shortconv|kda)\..*"
    r"|.*(cap|clamp|expert|moe|multiplier|nextn|norm|pooling|residual|scal|sparsity|window).*"
)
"""Keys that may change the numbers; other keys that are not read are names and sizes."""
QKV = ("attn_q", "attn_k", "attn_v")
OUTPUT = ("attn_output",)
MLP = ("ffn_gate", "ffn_up", "ffn_down")


def refuse_keys(sizes: Section, head_dim: int, read: Collection[str]) -> None:
    """Raise ValueError for a key that would change the numbers and is not read.

    Args:
        sizes: the keys of the architecture.
        head_dim: D.
        read: keys that this architecture reads, besides READ.
    """
    same = {"attention.value_length": head_dim, "attention.scale": head_dim**-0.5}
    for name, value in sizes.header.metadata.items():
        key = name.removeprefix(f"{sizes.name}.")
        if key == name or not NUMBERS.fullmatch(key) or key in READ | WITHOUT_EFFECT:
            continue
        if key in read:
            continue
        neutral = same.get(key, NEUTRAL.get(key, 0))
        if is_near(value, neutral) or is_near(value, 0) or (key in FACTORS and is_near(value, 1)):
            continue
        raise ValueError(f"{sizes.header.file}: {name} is {shown(value)}, which is not supported")


def is_near(value: object, neutral: float | bool) -> bool:
    """Whether two values of one type are equal, numbers up to fp32's rounding."""
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    return isinstance(value, int | float) and abs(value - neutral) <= 1e-6 * abs(neutral)


def refuse_tensors(header: Header, known: set[str], biased: Sequence[tuple[str, ...]]) -> None:
    """Raise ValueError for tensors, biases included, that the architecture has no place for.

    Args:
        header: of the file.
        known: the names of layers that have a weight, without `blk.N.`.
        biased: groups of those that may have biases: all of a group or none.
    """
    may_have = {name for group in biased for name in group}
    unknown = [name for name in header.tensors if not has_place(name, known, may_have)]
    if unknown:
        hint = " (a mixture of experts)" if any(EXPERTS.search(name) for name in unknown) else ""
        raise ValueError(
            f"{header.file} holds {', '.join(first_few(unknown))}{hint}, which is not supported by "
            f"the architecture {header.architecture!r} here"
        )
    for group in biased:
        has_biases(header, group)


EXPERTS = re.compile(r"_exps?\b|_shexp|gate_inp")


def has_place(name: str, known: set[str], biased: set[str]) -> bool:
    """Whether a model of these layers reads a tensor of that name."""
    match = re.fullmatch(r"(?:blk\.\d+\.)?(\w+)\.(weight|bias)", name)
    if not match or match[1] not in known:
        return False
    return match[2] == "weight" or match[1] in biased


def has_biases(header: Header, group: tuple[str, ...]) -> bool:
    """Whether the first layer's matrices of a group have biases.

    Raises:
        ValueError: some have one and others do not.
    """
    found = [name for name in group if f"blk.0.{name}.bias" in header.tensors]
    if found and len(found) < len(group):
        others = ", ".join(name for name in group if name not in found)
        raise ValueError(
            f"{header.file} has biases at {', '.join(found)} and none at {others}, which is not "
            "supported"
        )
    return bool(found)
