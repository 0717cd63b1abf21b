"""Which architectures there are. Adding a model is its file and one line here.

Owns: the table. Never: imports a model before it is asked for.
"""

import importlib
from collections.abc import Sequence
from typing import Any

MODELS = {
    "Qwen3ForCausalLM": "nv_models.qwen3.Qwen3",
    "LlamaForCausalLM": "nv_models.llama.Llama",
}


def supported_architecture(architectures: Sequence[str]) -> str:
    """The first of a checkpoint's architectures that is in the table.

    Raises:
        ValueError: none is; the message names the supported ones.
    """
    for architecture in architectures:
        if architecture in MODELS:
            return architecture
    named = ", ".join(architectures) or "(none named)"
    raise ValueError(f"architecture {named} is not supported; supported are {', '.join(MODELS)}")


def model_class(architecture: str) -> type[Any]:
    """Import and return the class behind an architecture's name: a `CausalLM`."""
    module, _, name = MODELS[supported_architecture([architecture])].rpartition(".")
    found: type[Any] = getattr(importlib.import_module(module), name)
    return found
