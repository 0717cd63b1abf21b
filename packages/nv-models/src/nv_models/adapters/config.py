"""adapter_config.json: the rank and the factor of each module, and all that is refused.

Owns the file's fields: each is read, changes nothing here, or is refused by name if it is set.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nv_models.fields import flag, naming, number, read_json, size, strings, table
from nv_models.missing import is_there, why_missing
from nv_models.quantization.expression import check_expression

Number = TypeVar("Number", int, float)
"""Of the values of a pattern."""

CONFIG = "adapter_config.json"
SAVED_BY_PEFT = "give the folder that peft's save_pretrained wrote"
MERGE = "merge it into the base model (`merge_and_unload`) and serve that"
TRAIN = "train the adapter without it"
INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin that leave the weights of the base model as they are."""
WITHOUT_EFFECT = frozenset(
    (
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "eva_config"),
        *("exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern"),
        *("layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "megatron_core"),
        *("modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r"),
        *("rank_pattern", "revision", "runtime_config", "target_modules", "task_type"),
        *("use_rslora", "init_lora_weights", "bias", "corda_config", "lora_ga_config"),
        *("ephemeral_gpu_offload",),
    )
)
"""Fields that are read here, and fields of training: the tensors decide which modules there are."""
REFUSED = {
    "use_dora": MERGE,
    "lora_bias": TRAIN,
    "use_qalora": MERGE,
    "use_bdlora": TRAIN,
    "alora_invocation_tokens": TRAIN,
    "layer_replication": MERGE,
    "trainable_token_indices": MERGE,
    "target_parameters": MERGE,
    "ensure_weight_tying": TRAIN,
}
"""Fields that change what an adapter computes, and what to do instead."""


@dataclass(frozen=True)
class AdapterConfig:
    """The values of an adapter_config.json that are used.

    Attributes:
        file: that was read.
        rank: r, where no pattern gives another.
        alpha: likewise.
        ranks: r by pattern.
        alphas: alpha by pattern.
        is_rank_stabilised: the factor is alpha / sqrt(r) (Kalajdzievski 2023, arXiv 2312.03732),
            else alpha / r.
    """

    file: Path
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_rank_stabilised: bool

    def rank_of(self, module: str) -> int:
        """R of a module, by its name in the base model."""
        return self.ranks.get(matching(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of a module's B A."""
        rank = self.rank_of(module)
        alpha = self.alphas.get(matching(self.alphas, module), self.alpha)
        return alpha / math.sqrt(rank) if self.is_rank_stabilised else alpha / rank


def matching(patterns: Iterable[str], module: str) -> str:
    """The first pattern that matches the end of a module's name, or else the name."""
    for pattern in patterns:
        if re.match(rf"(.*\.)?({pattern})$", module):
            return pattern
    return module


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read and check `adapter_config.json`.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is not JSON, not of LoRA, or asks for what is not computed here.
    """
    file = folder / CONFIG
    if not file.is_file():
        if is_there(file):
            raise FileNotFoundError(f"{file} {why_missing(file, '')}: {SAVED_BY_PEFT}")
        raise FileNotFoundError(f"{folder} has no {CONFIG}: {SAVED_BY_PEFT}")
    values = read_json(file)
    with naming(file):
        _refuse(values)
        return AdapterConfig(
            file,
            rank=size(values, "r"),
            alpha=number(values, "lora_alpha"),
            ranks=_pattern(values, "rank_pattern", size),
            alphas=_pattern(values, "alpha_pattern", number),
            is_rank_stabilised=flag(values, "use_rslora"),
        )


def _refuse(values: Mapping[str, Any]) -> None:
    """Raise ValueError for an adapter that computes something else."""
    if (kind := values.get("peft_type")) != "LORA":
        raise ValueError(f"peft_type is {kind!r:.200}: only LORA is read; {MERGE}")
    for name, fix in REFUSED.items():
        if values.get(name):
            raise ValueError(f"{name} is {values[name]!r:.200}, which is not computed: {fix}")
    if (bias := values.get("bias", "none")) != "none":
        raise ValueError(f"bias is {bias!r:.200}: it must be 'none'; {MERGE}")
    if (init := values.get("init_lora_weights", True)) not in INITS:
        raise ValueError(
            f"init_lora_weights is {init!r:.200}, which changed the base model's weights too: "
            "save it again with path_initial_model_for_weight_conversion, or serve the merged model"
        )
    if more := [each for each in strings(values, "modules_to_save") if each not in SAVED]:
        raise ValueError(
            f"modules_to_save has {more[0]!r:.200}: of whole modules only a classifier's score "
            f"is read; {MERGE}"
        )
    for name, value in values.items():
        if name not in WITHOUT_EFFECT and name not in REFUSED and value:
            raise ValueError(f"{name:.200} is {value!r:.200}, which is not known here: {MERGE}")


SAVED = ("score", "classifier")
"""Modules that peft itself adds for classifiers."""


def _pattern(
    values: Mapping[str, Any], name: str, read: Callable[[Mapping[str, Any], str], Number]
) -> dict[str, Number]:
    """Numbers by regular expression, each read as a field."""
    found = {}
    for pattern, value in table(values, name).items():
        place = f"{name}[{pattern!r}]"
        found[pattern] = read({place: value}, place)
        check_expression(pattern, name)
    return found
