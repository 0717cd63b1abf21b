"""The reading of pooling from a model's files and the user's options.

Owns the choice between text and pooling, and the meaning of the fields. Folders of
sentence-transformers are `sentence_transformers`'. Never reads a weight.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nv_models.class_names import OF_TOKENS, is_body, is_classifier
from nv_models.config import ModelConfig
from nv_models.fields import naming, size, strings, table
from nv_models.missing import is_there
from nv_models.pooling.label_tokens import label_tokens
from nv_models.pooling.pooler_config import Activation, PoolerConfig, Pooling
from nv_models.pooling.sentence_transformers import MODULES, read_modules

RUNNERS = ("auto", "generate", "pooling")
CONVERTS = ("auto", "none", "embed", "classify")
TASKS = {
    "auto": ("auto", "auto"),
    "generate": ("generate", "auto"),
    "embed": ("pooling", "embed"),
    "embedding": ("pooling", "embed"),
    "token_embed": ("pooling", "embed"),
    "classify": ("pooling", "classify"),
    "token_classify": ("pooling", "classify"),
    "reward": ("pooling", "classify"),
    "score": ("pooling", "auto"),
}
"""Values of `task`, vLLM's older option, as (runner, convert)."""
DEFAULT_LABELS = 2
"""Transformers' own, where config.json has none."""
PROBLEMS = {
    None: None,
    "single_label_classification": None,
    "multi_label_classification": Activation.SIGMOID,
    "regression": Activation.NONE,
}
"""Activations by `problem_type`; None: by the number of labels."""


class Asked(NamedTuple):
    """The user's options."""

    runner: str = "auto"
    convert: str = "auto"

    @classmethod
    def of(cls, runner: str, convert: str, task: str) -> "Asked":
        """The three options as two.

        Raises:
            ValueError: `task` and another option contradict each other.
        """
        by_task = cls(*TASKS[task])
        for name, given, implied in zip(cls._fields, (runner, convert), by_task, strict=True):
            if "auto" not in (given, implied) and given != implied:
                raise ValueError(
                    f"task is {task!r}, which means {name}={implied!r}, and {name} is {given!r}: "
                    "give one of them"
                )
        runner = by_task.runner if runner == "auto" else runner
        return cls(runner, by_task.convert if convert == "auto" else convert)


def read_pooler(
    folder: Path, config: ModelConfig, asked: Asked, raw: Mapping[str, Any]
) -> PoolerConfig | None:
    """The record of what the model makes of hidden states in place of logits.

    Args:
        folder: the result of `resolve`.
        config: of the same folder.
        asked: the user's options.
        raw: config.json, as the user's overrides make it.

    Returns:
        None if the model generates text.

    Raises:
        ValueError: the options contradict the files, or a module or field is not supported; the
            message names the file.
    """
    file = folder / "config.json"
    names = strings(raw, "architectures")
    classifies = any(map(is_classifier, names))
    has_no_head = classifies or any(map(is_body, names))
    if asked.runner == "generate":
        _check_generates(file, names, asked, has_no_head=has_no_head)
        return None
    has_modules = is_there(folder / MODULES)
    says_nothing = asked.runner == "auto" and asked.convert in ("auto", "none")
    if says_nothing and not has_no_head and not has_modules:
        return None
    if config.embedding_size:
        raise ValueError(
            f"{file}: the last hidden states are projected to {config.embedding_size} columns, "
            "which is not built for models that pool: use another checkpoint, or generate text"
        )
    if asked.convert != "classify" and (asked.convert == "embed" or not classifies):
        return _embedder(folder, config, has_modules=has_modules)
    with naming(file):
        return _classifier(folder, raw, config, names)


def _check_generates(
    file: Path, names: tuple[str, ...], asked: Asked, *, has_no_head: bool
) -> None:
    """Refuse to generate with what has no head for tokens, or is to be converted."""
    if asked.convert in ("embed", "classify"):
        raise ValueError(
            f'convert is {asked.convert!r} and runner "generate", which converts nothing: pass '
            'runner="pooling"'
        )
    if has_no_head:
        raise ValueError(
            f'runner is "generate", but {file} names {", ".join(names)}, which has no head for '
            'tokens: pass runner="pooling", or another checkpoint'
        )


def _embedder(folder: Path, config: ModelConfig, *, has_modules: bool) -> PoolerConfig:
    """Embeddings, as a folder of sentence-transformers describes them, or the last state."""
    tasks = ("embed", "token_embed")
    if has_modules:
        return read_modules(folder, config.hidden_size, tasks)
    return PoolerConfig(
        kind="embed",
        hidden_size=config.hidden_size,
        pooling=Pooling.LAST,
        activation=Activation.NORMALIZE,
        activates=True,
        tasks=tasks,
    )


def _classifier(
    folder: Path, raw: Mapping[str, Any], config: ModelConfig, names: tuple[str, ...]
) -> PoolerConfig:
    """Class values, by a head of the checkpoint's or by rows of its head for tokens."""
    of_tokens = any(name.endswith(OF_TOKENS) for name in names)
    tokens = label_tokens(raw, folder)
    num_labels = 1 if tokens.is_two_way else len(tokens.ids) or _num_labels(raw)
    problem = raw.get("problem_type")
    if not isinstance(problem, str | None) or problem not in PROBLEMS:
        raise ValueError(
            f"problem_type is {problem!r:.200}: it must be null or one of "
            f"{', '.join(filter(None, PROBLEMS))}"
        )
    by_count = Activation.SIGMOID if num_labels == 1 else Activation.SOFTMAX
    tasks = ("token_classify",) if of_tokens else ("classify", "token_classify")
    tied = config.tie_word_embeddings
    return PoolerConfig(
        kind="classify",
        hidden_size=config.hidden_size,
        pooling=Pooling.LAST,
        activation=PROBLEMS[problem] or by_count,
        activates=True,
        tasks=("score", *tasks) if num_labels == 1 and not of_tokens else tasks,
        labels=_labels(raw, num_labels),
        has_bias=of_tokens,
        label_tokens=tokens.ids,
        is_two_way=tokens.is_two_way,
        label_source="model.embed_tokens.weight" if tied else "lm_head.weight",
        vocab_size=config.vocab_size,
    )


def _labels(raw: Mapping[str, Any], num_labels: int) -> tuple[str, ...]:
    """Names of labels; one without a name has the name that transformers gives it."""
    names = table(raw, "id2label")
    return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(num_labels))


def _num_labels(raw: Mapping[str, Any]) -> int:
    return size(raw, "num_labels", len(table(raw, "id2label")) or DEFAULT_LABELS)
