"""What a checkpoint says about its model, as one frozen record.

Owns: ModelConfig and its reading from config.json and generation_config.json, through transformers'
own config classes, so that defaults and old spellings mean what they mean there.
Never: reads a weight, or is written to.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from nv_models.registry import supported_architecture
from nv_models.rope import RopeConfig


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling values that generation_config.json recommends; None where it says nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's sizes and constants.

    Args:
        architecture: a name that `registry` knows.
        vocab_size: token ids are below it; also the columns of the logits.
        hidden_size: E.
        intermediate_size: width of the MLP.
        num_layers: decoder layers, and KV caches.
        num_q_heads: Hq over all ranks.
        num_kv_heads: Hkv over all ranks.
        head_dim: D.
        rms_norm_eps: added to the mean square.
        max_position_embeddings: the longest sequence the checkpoint promises.
        rope: the rotary embedding.
        attention_bias: q, k, v and o have biases.
        mlp_bias: gate, up and down have biases.
        tie_word_embeddings: the head is the embedding.
        eos_token_ids: any of them ends a sequence; empty if none is named.
        bos_token_id: None if there is none.
        dtype: of the checkpoint, or of a loaded model; None: the files decide.
        generation: recommended sampling values.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: torch.dtype | None = None
    generation: GenerationDefaults = GenerationDefaults()

    @classmethod
    def from_path(cls, path: str | Path) -> "ModelConfig":
        """Read a checkpoint folder (what `resolve` returned).

        Raises:
            FileNotFoundError: no config.json in it.
            ValueError: not JSON, an architecture or a feature that is not supported.
            NotImplementedError: quantized weights.
        """
        folder = Path(path)
        raw = read_json(folder / "config.json")
        generation_file = folder / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else {}
        try:
            return model_config(raw, generation)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / 'config.json'}: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, with errors that name it."""
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist; a model folder holds config.json, *.safetensors and the "
            "tokenizer's files"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not a JSON object")
    return content


def model_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """The record for the contents of config.json and generation_config.json."""
    architecture = supported_architecture(raw.get("architectures") or ())
    refuse_quantized(raw)
    config = AutoConfig.for_model(**raw)
    refuse_unsupported(config)
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope=rope_config(config),
        attention_bias=config.attention_bias,
        mlp_bias=getattr(config, "mlp_bias", False),
        tie_word_embeddings=config.tie_word_embeddings,
        eos_token_ids=eos_token_ids(raw, generation, config),
        bos_token_id=config.bos_token_id,
        dtype=config.dtype if isinstance(config.dtype, torch.dtype) else None,
        generation=GenerationDefaults(
            **{name: generation.get(name) for name in GenerationDefaults.__dataclass_fields__}
        ),
    )


def rope_config(config: PreTrainedConfig) -> RopeConfig:
    """The rotary embedding of a config, both spellings already merged by transformers."""
    parameters = dict(config.rope_parameters)
    if parameters["rope_type"] == "yarn" and parameters.get("factor") is None:
        trained = parameters["original_max_position_embeddings"]
        parameters["factor"] = config.max_position_embeddings / trained
    return RopeConfig.from_parameters(parameters)


def refuse_quantized(raw: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for a checkpoint whose weights are not plain floats."""
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise NotImplementedError(
            f"the checkpoint is quantized ({method}), which is not built yet; "
            "use the unquantized one or a GGUF file"
        )


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Raise ValueError for a feature that would silently be computed wrong."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise ValueError(
            f"layers of type {', '.join(sorted(kinds))} are not supported (sliding_window = "
            f"{config.sliding_window}); set use_sliding_window to false to attend to everything"
        )
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act {config.hidden_act!r} is not supported; only 'silu' is")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )


def eos_token_ids(
    raw: Mapping[str, Any], generation: Mapping[str, Any], config: PreTrainedConfig
) -> tuple[int, ...]:
    """Every id that either file names, in order; transformers' default only if neither does."""
    named = [raw.get("eos_token_id"), generation.get("eos_token_id")]
    if all(value is None for value in named):
        named = [config.eos_token_id]
    ids: list[int] = []
    for value in named:
        ids.extend([value] if isinstance(value, int) else value or ())
    return tuple(dict.fromkeys(ids))
