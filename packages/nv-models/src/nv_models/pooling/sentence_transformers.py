"""Folders of sentence-transformers: modules.json, and the files that it names.

Owns their forms: both spellings of the pooling mode, and module types with or without the name of
their package. Never reads a weight.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nv_models.fields import flag, naming, read_json, read_value, size, table
from nv_models.missing import is_there
from nv_models.pooling.pooler_config import Activation, DenseLayer, PoolerConfig, Pooling

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
EMPTY_PROMPTS = ("query", "document")
"""Names that sentence-transformers gives to empty prompts where the file has no others."""
TRANSFORMER_FILE = "sentence_bert_config.json"
"""The Transformer module's own fields, whatever the model."""
POOLING, NORMALIZE, DENSE, TRANSFORMER = "Pooling", "Normalize", "Dense", "Transformer"
OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Flags of the old spelling, and their mode in the new one."""
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")
"""Classes of torch.nn that a Dense layer may end in."""


def read_modules(folder: Path, hidden_size: int, tasks: tuple[str, ...]) -> PoolerConfig:
    """The pooler that modules.json describes.

    Raises:
        ValueError: a module, a mode or a width that is not supported.
    """
    pooling, dense, normalizes, widths = None, [], False, [hidden_size]
    pools_prompt = True
    for kind, part in _modules(folder):
        if kind == TRANSFORMER and part == folder and pooling is None:
            continue
        if kind == POOLING and pooling is None:
            values = read_json(part / "config.json")
            with naming(part / "config.json"):
                pooling, pools_prompt = _pooling(values), flag(values, "include_prompt", True)
        elif kind == DENSE and pooling is not None and not normalizes:
            dense.append(_dense(part))
            if dense[-1].in_features != widths[-1]:
                raise ValueError(
                    f"{part / 'config.json'}: in_features is {dense[-1].in_features}, but the "
                    f"module before it gives {widths[-1]} values"
                )
            widths.append(dense[-1].out_features)
        elif kind == NORMALIZE and pooling is not None:
            normalizes = True
        else:
            raise ValueError(
                f"{folder / MODULES} has {kind} in {part}: supported are a Transformer in the "
                "folder itself, then a Pooling, then Dense layers, then a Normalize"
            )
    prompts, default_prompt = _prompts(folder / PROMPTS)
    return PoolerConfig(
        kind="embed",
        hidden_size=hidden_size,
        pooling=pooling or Pooling.LAST,
        activation=Activation.NORMALIZE,
        activates=normalizes,
        tasks=tasks,
        dense=tuple(dense),
        prompts=prompts,
        default_prompt=default_prompt,
        pools_prompt=pools_prompt,
        max_length=_max_length(folder / TRANSFORMER_FILE),
        length_place=f"max_seq_length in {folder / TRANSFORMER_FILE}",
    )


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Type and folder of each module, in order."""
    file = folder / MODULES
    listed = read_value(file)
    try:
        return [
            (str(each["type"]).rpartition(".")[2], folder / str(each.get("path", "")))
            for each in listed
        ]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{file} is not a list of modules with type and path ({error!r}); download it again"
        ) from error


def _pooling(values: Mapping[str, Any]) -> Pooling:
    """The mode, in the new spelling or the old one."""
    mode = values.get("pooling_mode")
    if mode is None:
        on = [mode for name, mode in OLD_MODES.items() if flag(values, name)]
        mode = "+".join(on) or "mean"
    try:
        return Pooling(mode)
    except ValueError:
        known = ", ".join(each.value for each in Pooling)
        raise ValueError(f"pooling_mode is {mode!r:.200}: it must be one of {known}") from None


def _max_length(file: Path) -> int | None:
    """The most tokens of a text that the Transformer module's file names, if it does.

    Raises:
        ValueError: texts are to be made lower case, which is not built.
    """
    if not is_there(file):
        return None
    values = read_json(file)
    with naming(file):
        if flag(values, "do_lower_case"):
            raise ValueError(
                "do_lower_case is true, and texts are read as they are here: set it to false, and "
                "give texts in lower case"
            )
        named = values.get("max_seq_length")
        return None if named is None else size(values, "max_seq_length")


def _dense(folder: Path) -> DenseLayer:
    values = read_json(folder / "config.json")
    activation = str(values.get("activation_function", "torch.nn.Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{folder / 'config.json'}: activation_function is {activation!r}: it must be one of "
            f"{', '.join(ACTIVATIONS)}"
        )
    has_bias = values.get("bias") is None or flag(values, "bias")
    sizes = size(values, "in_features"), size(values, "out_features")
    return DenseLayer(folder, *sizes, has_bias, activation)


def _prompts(file: Path) -> tuple[tuple[tuple[str, str], ...], str | None]:
    """Prompts by their names, and the name of the default one, if the file has any."""
    if not is_there(file):
        return (), None
    values = read_json(file)
    with naming(file):
        prompts = tuple((str(name), str(text)) for name, text in table(values, "prompts").items())
        default = values.get("default_prompt_name")
        names = [name for name, _ in prompts]
        if default is not None and default not in (*names, *EMPTY_PROMPTS):
            raise ValueError(
                f"default_prompt_name is {default!r:.200}: it must be null or one of the prompts, "
                f"{', '.join(map(repr, names)) or 'of which there are none'}"
            )
    return prompts, default
