"""The reading of a checkpoint's config.json and generation_config.json.

Owns the meaning of their fields. Defaults and both spellings of the rope mean what they mean to
transformers' config classes, which a test compares; importing the classes would take seconds at
each start. Never reads a weight.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nv_kernels as nk

from nv_models.architectures import ARCHITECTURES, Architecture, supported_architecture
from nv_models.checkpoint.gguf.folder import source_of
from nv_models.checkpoint.gguf.keys import KEYS, naming_keys
from nv_models.config import DTYPES, Gated, GenerationDefaults, LayerSpec, ModelConfig
from nv_models.fields import (
    flag,
    naming,
    number,
    numbers,
    read_json,
    size,
    strings,
    token_ids,
)
from nv_models.listing import first_few
from nv_models.missing import is_there
from nv_models.overrides import merged, plain_overrides
from nv_models.quantization import (
    OTHER_FILES,
    quantization_config,
    quantization_method,
)
from nv_models.rope import RopeConfig, frequencies
from nv_models.rope_parameters import rope_config
from nv_models.support import (
    refuse_narrow,
    refuse_unread,
    refuse_unsupported,
)

GENERATION_FIELDS = tuple(GenerationDefaults.__dataclass_fields__)
GENERATION = "generation_config.json"
UNREAD = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "sequence_bias": None,
    "suppress_tokens": None,
}
"""Fields of the second file that change transformers' texts and not ours, and where they do not."""
LARGEST_ID = 2**31 - 1
"""Token ids are kept in 32 bits; a larger one is a mistake."""


@dataclass(frozen=True)
class ConfigFiles:
    """The fields of a checkpoint's two files, read once.

    Attributes:
        folder: of the checkpoint.
        raw: the fields of config.json, with `hf_overrides` in them.
        generation: those of generation_config.json; empty if there is none.
        name: of the first, in errors.
        quantization_name: of the one that describes how weights are quantized, in errors.
    """

    folder: Path
    raw: Mapping[str, Any]
    generation: Mapping[str, Any]
    name: str
    quantization_name: str

    @classmethod
    def read(cls, folder: Path, overrides: Mapping[str, Any] | None = None) -> "ConfigFiles":
        """Read both; errors are those of `read_config`."""
        file, generation = folder / "config.json", folder / GENERATION
        name = f"{file} with hf_overrides" if overrides else str(file)
        values = read_json(file)
        with naming(file):
            other = other_file(values, folder)
        if other is not None:
            values["quantization_config"] = {
                "quant_method": OTHER_FILES[other.name],
                **read_json(other),
            }
        raw = merged(values, plain_overrides(overrides))
        defaults = read_json(generation) if is_there(generation) else {}
        return cls(folder, raw, defaults, name, str(other) if other else name)

    def model_config(self) -> ModelConfig:
        """The record that the files describe; errors are those of `read_config`."""
        with naming(self.folder / GENERATION):
            defaults = GenerationDefaults(**numbers(self.generation, GENERATION_FIELDS))
            named = eos_ids(self.generation)
        source = source_of(self.folder)
        is_gguf = source != self.folder
        with naming_keys(source, self.raw["model_type"]) if is_gguf else naming(self.name):
            config = model_config(self.raw, defaults, named)
        return replace(config, length_place=self._length_place(source))

    def _length_place(self, source: Path) -> str:
        """Which field of which file bounds a sequence's length, in errors."""
        field, file = "max_position_embeddings", self.name
        if source != self.folder:
            field = f"{self.raw['model_type']}.{KEYS[field]}"
            file = file.replace(str(self.folder / "config.json"), str(source))
        return f"{field} and the scaling of its rope, in {file}"

    def warn_of_undrawable(self, vocab_size: int) -> None:
        """Warn of the EOS ids that `model_config` leaves out, as they can never be drawn.

        Args:
            vocab_size: ids from here on have no logit.
        """
        for file, values in (("config.json", self.raw), (GENERATION, self.generation)):
            if gone := [str(token) for token in eos_ids(values) if token >= vocab_size]:
                warnings.warn(
                    f"{self.folder / file}: eos_token_id names {', '.join(first_few(gone))}, but "
                    f"the vocabulary is 0 .. {vocab_size - 1}: left out, as no such token is ever "
                    "drawn",
                    stacklevel=3,
                )

    def warn_of_unread(self) -> None:
        """Warn of what generation_config.json recommends and nothing here follows."""
        values = {name: self.generation.get(name) for name in UNREAD}
        given = [f"{n} {v!r:.60}" for n, v in values.items() if v not in (None, UNREAD[n], [], {})]
        if given:
            warnings.warn(
                f"{self.folder / GENERATION} recommends {', '.join(given)}, which is not read: "
                "give SamplingParams with what you need of it",
                stacklevel=3,
            )


def other_file(raw: Mapping[str, Any], folder: Path) -> Path | None:
    """The quantization_config that older tools wrote beside config.json; None: it has its own."""
    if quantization_config(raw):
        return None
    return next((folder / name for name in OTHER_FILES if is_there(folder / name)), None)


def read_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read the config of a checkpoint folder (the result of `resolve`).

    Args:
        path: the folder.
        overrides: fields in place of those of config.json: `hf_overrides`.

    Raises:
        FileNotFoundError: the folder has no config.json.
        ValueError: not JSON, a field of the wrong type or size, an architecture or a feature
            that is not supported; the message names the file.
        NotImplementedError: weights that are quantized in a way that is not read.
    """
    return ConfigFiles.read(Path(path), overrides).model_config()


def model_config(
    raw: Mapping[str, Any], generation: GenerationDefaults, generation_eos: tuple[int, ...]
) -> ModelConfig:
    """The record of the contents of config.json and of what generation_config.json adds."""
    architecture = supported_architecture(strings(raw, "architectures"))
    row = ARCHITECTURES[architecture]
    quantization_method(raw, row.quantization)
    refuse_narrow(raw)
    values = {**row.defaults, **raw}
    refuse_unsupported(values, row)
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
    refuse_part(rope, row, head_dim)
    width, bias = size(values, row.width_field), _has_bias(values, row.mlp_bias)
    mlp = Gated(width, bias, row.activation)
    layer = LayerSpec(nk.AttentionSpec(scale=head_dim**-0.5), mlp, rope)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=size(values, "vocab_size"),
        hidden_size=hidden_size,
        layers=row.layers(values, layer),
        num_q_heads=num_q_heads,
        num_kv_heads=size(values, "num_key_value_heads", num_q_heads),
        head_dim=head_dim,
        rms_norm_eps=number(values, "rms_norm_eps", 1e-6, at_most=1.0),
        max_position_embeddings=longest,
        max_length=rope.reach(longest),
        qk_norm=row.qk_norm,
        qk_norm_whole=row.qk_norm_whole,
        qkv_bias=_has_bias(values, row.qkv_bias),
        output_bias=_has_bias(values, row.output_bias),
        norms=row.norms,
        norm_kind=row.norm_kind,
        fused=row.fused,
        rotates_neighbours=row.rotates_neighbours,
        factors=row.factors(values),
        embedding_size=_embedding_size(values, row, hidden_size),
        tie_word_embeddings=flag(values, "tie_word_embeddings"),
        eos_token_ids=eos_token_ids(raw, generation_eos, values),
        names_eos=bool(eos_ids(raw) + generation_eos),
        bos_token_id=next(iter(token_ids(values, "bos_token_id")), None),
        dtype=DTYPES.get(str(named)),
        generation=generation,
    )
    for each in config.ropes:
        frequencies(each, head_dim, config.max_length)  # raises if the rope lacks a parameter
    return config


def _embedding_size(values: Mapping[str, Any], row: Architecture, hidden_size: int) -> int:
    """Columns of the embedding; 0: they are `hidden_size`."""
    if row.embedding_field is None:
        return 0
    columns = size(values, row.embedding_field, hidden_size)
    return 0 if columns == hidden_size else columns


def refuse_part(rope: RopeConfig, row: Architecture, head_dim: int) -> None:
    """Raise ValueError for a rotated part of a head that is not computed."""
    part = rope.partial_rotary_factor
    if part != 1 and "partial_rotary_factor" not in row.reads:
        raise ValueError(
            f"partial_rotary_factor {part:g} is not supported; only 1.0 is, in this architecture"
        )
    if rope.rotated(head_dim) < 2 or rope.rotated(head_dim) % 2:
        raise ValueError(
            f"partial_rotary_factor is {part:g}, so that {rope.rotated(head_dim)} of a head's "
            f"{head_dim} dimensions are rotated: it must be an even number of them"
        )


def _has_bias(values: Mapping[str, Any], fixed: bool | str) -> bool:
    """The value that an architecture's row fixes, or that of the field that the row names."""
    return flag(values, fixed) if isinstance(fixed, str) else fixed


def eos_token_ids(
    raw: Mapping[str, Any], generation_eos: tuple[int, ...], values: Mapping[str, Any]
) -> tuple[int, ...]:
    """Every id of the vocabulary that either file names, in order.

    Where neither names one, the architecture's default.
    """
    named = eos_ids(raw) + generation_eos or eos_ids(values)
    vocab_size = size(values, "vocab_size")
    return tuple(dict.fromkeys(token for token in named if token < vocab_size))


def eos_ids(values: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that one file names."""
    ids = token_ids(values, "eos_token_id")
    for token in ids:
        if not 0 <= token <= LARGEST_ID:
            raise ValueError(
                f"eos_token_id is {token}: it must be an integer from 0 to {LARGEST_ID}"
            )
    return ids
