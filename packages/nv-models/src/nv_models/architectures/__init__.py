"""The architectures that are supported: a row each, in a file of its family.

Owns the table. Never imports a model before `model_class` is called.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from nv_models.architectures import (
    exaone4,
    gemma,
    glm4,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo,
    opt,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from nv_models.architectures.refused import reason
from nv_models.architectures.row import Architecture
from nv_models.class_names import causal_name
from nv_models.listing import first_few

__all__ = [
    "ARCHITECTURES",
    "GGUF_NAMES",
    "Architecture",
    "gguf_architecture",
    "model_class",
    "supported_architecture",
]


ARCHITECTURES = {
    "Qwen3ForCausalLM": qwen3.QWEN3,
    "LlamaForCausalLM": llama.LLAMA,
    "Qwen2ForCausalLM": qwen2.QWEN2,
    "MistralForCausalLM": mistral.MISTRAL,
    "MinistralForCausalLM": mistral.MINISTRAL,
    "Phi3ForCausalLM": phi3.PHI3,
    "SmolLM3ForCausalLM": smollm3.SMOLLM3,
    "GraniteForCausalLM": granite.GRANITE,
    "Olmo2ForCausalLM": olmo.OLMO2,
    "Olmo3ForCausalLM": olmo.OLMO3,
    "Gemma2ForCausalLM": gemma.GEMMA2,
    "Gemma3ForCausalLM": gemma.GEMMA3,
    "Glm4ForCausalLM": glm4.GLM4,
    "Exaone4ForCausalLM": exaone4.EXAONE4,
    "GptOssForCausalLM": gpt_oss.GPT_OSS,
    "OPTForCausalLM": opt.OPT,
    "Qwen3MoeForCausalLM": qwen3_moe.QWEN3_MOE,
    "MixtralForCausalLM": mixtral.MIXTRAL,
}
SAME = {"Gemma3TextForCausalLM": "Gemma3ForCausalLM"}
"""Names that `causal_name` makes of a family's other classes (Gemma3TextModel), and its own name.
"""
GGUF_NAMES = tuple(sorted({row.gguf for row in ARCHITECTURES.values() if row.gguf}))
"""Each `general.architecture` of the GGUF files that are read."""


def supported_architecture(architectures: Sequence[str]) -> str:
    """The first of a checkpoint's architectures that is in the table.

    A class without a head, or with one for classes, counts as the one of its family with a head for
    tokens: what differs is `nv_models.pooling`'s.

    Raises:
        ValueError: none is; the message names the supported ones.
    """
    for name in map(causal_name, architectures):
        architecture = SAME.get(name, name)
        if architecture in ARCHITECTURES:
            return architecture
    named = ", ".join(first_few(architectures)) or "(none named)"
    why = next(filter(None, map(reason, architectures)), None)
    because = f", as {why}" if why else ""
    raise ValueError(
        f"architecture {named} is not supported{because}; supported are {', '.join(ARCHITECTURES)}"
    )


def gguf_architecture(name: str, has_experts: bool) -> str | None:
    """The architecture of GGUF files; None: such files are not read.

    Args:
        name: their `general.architecture`. llama.cpp gives Llama and Mixtral one name.
        has_experts: whether they name a number of experts.
    """
    found = [each for each, row in ARCHITECTURES.items() if row.gguf == name]
    alike = [each for each in found if bool(ARCHITECTURES[each].gguf_experts) == has_experts]
    return next(iter(alike or found), None)


def model_class(architecture: str) -> type[Any]:
    """Import and return an architecture's class."""
    row = ARCHITECTURES[supported_architecture([architecture])]
    module, _, name = row.model.rpartition(".")
    found: type[Any] = getattr(importlib.import_module(module), name)
    return found
