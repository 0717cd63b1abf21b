"""The architectures that are supported, one row each.

Owns the table: the class of each architecture, and the constants that config.json does not have.
Never imports a model before `model_class` is called.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nv_models.class_names import causal_name
from nv_models.config import LayerNorms
from nv_models.listing import first_few


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The constants that all checkpoints of an architecture share.

    Args:
        model: the class, a `CausalLM`, by its full name.
        qk_norm: every query and key head goes through an RMS norm before its rotation.
        qkv_bias: whether q, k and v have biases: True, False, or the name of the field of
            config.json that decides.
        output_bias: the same of attention's output.
        mlp_bias: the same of gate, up and down.
        norms: the norms of a layer.
        gguf: `general.architecture` of its GGUF files.
        gguf_rotates_neighbours: its GGUF files hold the rows of q and k in llama.cpp's order.
        defaults: fields that transformers' config class adds where config.json lacks them.
    """

    model: str = "nv_models.decoder.Decoder"
    qk_norm: bool = False
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    norms: LayerNorms = LayerNorms()  # noqa: RUF009  # frozen
    gguf: str
    gguf_rotates_neighbours: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


ARCHITECTURES = {
    "Qwen3ForCausalLM": Architecture(
        qk_norm=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        gguf="qwen3",
        defaults={"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    ),
    "LlamaForCausalLM": Architecture(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        gguf="llama",
        gguf_rotates_neighbours=True,
        defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    ),
}
GGUF_NAMES = {row.gguf: name for name, row in sorted(ARCHITECTURES.items())}
"""Architectures by `general.architecture`."""


def supported_architecture(architectures: Sequence[str]) -> str:
    """The first of a checkpoint's architectures that is in the table.

    A class without a head, or with one for classes, counts as the one of its family with a head for
    tokens: what differs is `nv_models.pooling`'s.

    Raises:
        ValueError: none is; the message names the supported ones.
    """
    for architecture in map(causal_name, architectures):
        if architecture in ARCHITECTURES:
            return architecture
    named = ", ".join(first_few(architectures)) or "(none named)"
    raise ValueError(
        f"architecture {named} is not supported; supported are {', '.join(ARCHITECTURES)}"
    )


def model_class(architecture: str) -> type[Any]:
    """Import and return an architecture's class."""
    row = ARCHITECTURES[supported_architecture([architecture])]
    module, _, name = row.model.rpartition(".")
    found: type[Any] = getattr(importlib.import_module(module), name)
    return found
