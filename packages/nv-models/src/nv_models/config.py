"""What a checkpoint says about its model, as one frozen record.

Owns: ModelConfig and its reading from config.json and generation_config.json. Defaults and both
spellings of the rope mean what transformers' config classes make of them, which a test compares;
the classes themselves would cost seconds of imports at each start.
Never: reads a weight, or is written to.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nv_kernels as nk
import torch

from nv_models.architectures import ARCHITECTURES, supported_architecture
from nv_models.fields import flag, number, numbers, read_json, size, strings, table, token_ids
from nv_models.listing import first_few
from nv_models.rope import RopeConfig, frequencies
from nv_models.support import refuse_unread, refuse_unread_rope

LARGEST_ID = 2**31 - 1
"""What a token id is kept in; a larger one is none."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NARROW = re.compile(r"(torch\.)?(float|u?int)[48](_.*)?")
"""Names of dtypes that only quantized weights have."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling values that generation_config.json recommends; None where it says nothing.

    They are numbers; the sampling parameters check their ranges.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


GENERATION_FIELDS = tuple(GenerationDefaults.__dataclass_fields__)


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer.

    Args:
        attention: how it attends.
    """

    attention: nk.AttentionSpec


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's sizes and constants.

    Args:
        architecture: a name that `architectures` knows.
        vocab_size: token ids are below it; also the columns of the logits.
        hidden_size: E.
        intermediate_size: width of the MLP.
        layers: how each decoder layer attends, in order; each has a KV cache.
        num_q_heads: Hq over all ranks.
        num_kv_heads: Hkv over all ranks.
        head_dim: D.
        rms_norm_eps: added to the mean square.
        max_position_embeddings: what the checkpoint names so.
        max_length: the longest sequence: `max_position_embeddings`, or what a scaled rope makes of
            it (`RopeConfig.reach`); of a loaded model, where its table of angles ends.
        rope: the rotary embedding.
        qk_norm: query and key heads are normed before their rotation.
        qkv_bias: q, k and v have biases.
        output_bias: attention's output has a bias.
        mlp_bias: gate, up and down have biases.
        tie_word_embeddings: the head is the embedding.
        eos_token_ids: any of them ends a sequence; empty if none is named. See `ends`.
        names_eos: False if the files name none, so that they are the architecture's default.
        bos_token_id: None if there is none.
        dtype: of the checkpoint, or of a loaded model; None: the files decide.
        generation: recommended sampling values.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    max_length: int
    rope: RopeConfig
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    names_eos: bool = True
    bos_token_id: int | None = None
    dtype: torch.dtype | None = None
    generation: GenerationDefaults = GenerationDefaults()

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer's products, over all ranks."""
        heads = 2 * self.num_q_heads + 2 * self.num_kv_heads
        return self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)

    def ends(self, tokenizer_eos: Iterable[int] = ()) -> tuple[int, ...]:
        """Every id that ends a sequence: those of the files, and those of the tokenizer.

        The architecture's default counts where neither names one.

        Args:
            tokenizer_eos: the tokenizer's own EOS; it may differ from what the files name, as
                fine-tunes often change the one and leave the others.

        Raises:
            ValueError: an id past the vocabulary.
        """
        for token in (more := tuple(tokenizer_eos)):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"the tokenizer's EOS has the id {token}, but the vocabulary is 0 .. "
                    f"{self.vocab_size - 1}: give the model's own tokenizer"
                )
        own = self.eos_token_ids if self.names_eos or not more else ()
        return tuple(dict.fromkeys((*own, *more)))

    @classmethod
    def from_path(cls, path: str | Path) -> "ModelConfig":
        """Read a checkpoint folder (what `resolve` returned).

        Raises:
            FileNotFoundError: no config.json in it.
            ValueError: not JSON, a field of the wrong type or size, an architecture or a feature
                that is not supported; the message names the file.
            NotImplementedError: quantized weights.

        Warns:
            UserWarning: an EOS id past the vocabulary, which no logit stands for, was left out.
        """
        folder = Path(path)
        config_file, generation_file = folder / "config.json", folder / "generation_config.json"
        raw = read_json(config_file)
        generation = read_json(generation_file) if generation_file.exists() else {}
        with _naming(generation_file):
            defaults = GenerationDefaults(**numbers(generation, GENERATION_FIELDS))
            named = eos_ids(generation)
        with _naming(config_file):
            config = model_config(raw, defaults, named)
        for file, ids in ((config_file, eos_ids(raw)), (generation_file, named)):
            _warn_of_undrawable(file, ids, config.vocab_size)
        return config


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Put a file's name before what is wrong with its contents."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _warn_of_undrawable(file: Path, ids: tuple[int, ...], vocab_size: int) -> None:
    """Say which EOS ids are left out, as they can never be drawn."""
    if gone := [str(token) for token in ids if token >= vocab_size]:
        warnings.warn(
            f"{file}: eos_token_id names {', '.join(first_few(gone))}, but the vocabulary is "
            f"0 .. {vocab_size - 1}: left out, as no such token is ever drawn",
            stacklevel=1,  # so that it is said once, though the file is read several times
        )


def model_config(
    raw: Mapping[str, Any], generation: GenerationDefaults, generation_eos: tuple[int, ...]
) -> ModelConfig:
    """The record for the contents of config.json and what generation_config.json added."""
    architecture = supported_architecture(strings(raw, "architectures"))
    refuse_quantized(raw)
    row = ARCHITECTURES[architecture]
    values = {**row.defaults, **raw}
    refuse_unsupported(values)
    num_q_heads = size(values, "num_attention_heads")
    hidden_size = size(values, "hidden_size")
    named = values.get("dtype") or values.get("torch_dtype")
    head_dim = size(values, "head_dim", hidden_size // num_q_heads)
    if head_dim % 2:
        raise ValueError(
            f"head_dim is {head_dim}: it must be even, as the rotary embedding turns pairs; use "
            "another checkpoint"
        )
    refuse_unread(values, row, head_dim)
    rope, longest = rope_config(values), size(values, "max_position_embeddings")
    layer = LayerSpec(nk.AttentionSpec(scale=head_dim**-0.5))
    config = ModelConfig(
        architecture=architecture,
        vocab_size=size(values, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=size(values, "intermediate_size"),
        layers=(layer,) * size(values, "num_hidden_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=size(values, "num_key_value_heads", num_q_heads),
        head_dim=head_dim,
        rms_norm_eps=number(values, "rms_norm_eps", 1e-6),
        max_position_embeddings=longest,
        max_length=rope.reach(longest),
        rope=rope,
        qk_norm=row.qk_norm,
        qkv_bias=_has_bias(values, row.qkv_bias),
        output_bias=_has_bias(values, row.output_bias),
        mlp_bias=_has_bias(values, row.mlp_bias),
        tie_word_embeddings=flag(values, "tie_word_embeddings"),
        eos_token_ids=eos_token_ids(raw, generation_eos, values),
        names_eos=bool(eos_ids(raw) + generation_eos),
        bos_token_id=next(iter(token_ids(values, "bos_token_id")), None),
        dtype=DTYPES.get(str(named)),
        generation=generation,
    )
    frequencies(config.rope, config.head_dim)  # what its rope lacks is said here, with the file
    return config


def _has_bias(values: Mapping[str, Any], said: bool | str) -> bool:
    """What an architecture's row fixes, or the field that it names."""
    return flag(values, said) if isinstance(said, str) else said


def rope_config(values: Mapping[str, Any]) -> RopeConfig:
    """The rotary embedding, from `rope_parameters` (version 5) or `rope_theta` and `rope_scaling`.

    The order of precedence is transformers' `convert_rope_params_to_dict`.
    """
    given = table(values, "rope_scaling") or table(values, "rope_parameters")
    if "full_attention" in given:  # one a layer type; only one type is supported
        given = table(given, "full_attention")
    longest = size(values, "max_position_embeddings")
    parameters = {
        "rope_type": given.get("type", "default"),
        "rope_theta": values.get("rope_theta", 10000.0),
        "partial_rotary_factor": values.get("partial_rotary_factor") or 1.0,
        "original_max_position_embeddings": longest,
        **given,
    }
    if values.get("original_max_position_embeddings"):
        parameters |= numbers(values, ("original_max_position_embeddings",))
    if parameters["rope_type"] == "yarn" and parameters.get("factor") is None:
        parameters["factor"] = longest / size(parameters, "original_max_position_embeddings")
    refuse_unread_rope(parameters)
    return RopeConfig.from_parameters(parameters)


def refuse_quantized(raw: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for a checkpoint whose weights are not plain floats."""
    method = None
    if quantization := table(raw, "quantization_config") or table(raw, "compression_config"):
        method = quantization.get("quant_method") or "unknown"
    for name in ("dtype", "torch_dtype"):
        if NARROW.fullmatch(str(raw.get(name))):
            method = f"{name} is {raw[name]}"
    if method:
        raise NotImplementedError(
            f"the checkpoint is quantized ({method}), which is not built yet; "
            "use the unquantized one or a GGUF file"
        )


def refuse_unsupported(values: Mapping[str, Any]) -> None:
    """Raise ValueError for a feature that would silently be computed wrong."""
    kinds = set(strings(values, "layer_types")) - {"full_attention"}
    first_windowed = numbers(values, ("max_window_layers",)).get("max_window_layers", 28)
    windowed = flag(values, "use_sliding_window") and values.get("sliding_window", 4096)
    if kinds or (windowed and first_windowed < size(values, "num_hidden_layers")):
        raise ValueError(
            f"sliding_window = {values.get('sliding_window')} is active, which is not supported; "
            "set use_sliding_window to false (and layer_types to null) to attend to everything"
        )
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported; only 'silu' is")
    num_q_heads = size(values, "num_attention_heads")
    num_kv_heads = size(values, "num_key_value_heads", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads {num_q_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )


def eos_token_ids(
    raw: Mapping[str, Any], generation_eos: tuple[int, ...], values: Mapping[str, Any]
) -> tuple[int, ...]:
    """Every id of the vocabulary that either file names, in order.

    Only if neither names any, the class's default.
    """
    named = eos_ids(raw) + generation_eos or eos_ids(values)
    vocab_size = size(values, "vocab_size")
    return tuple(dict.fromkeys(token for token in named if token < vocab_size))


def eos_ids(values: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that one file names."""
    ids = token_ids(values, "eos_token_id")
    for token in ids:
        if not 0 <= token <= LARGEST_ID:
            raise ValueError(f"eos_token_id must be in 0 .. {LARGEST_ID}, got {token}")
    return ids
