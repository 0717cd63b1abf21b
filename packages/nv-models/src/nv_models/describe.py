"""The description of a model by its files and the user's options, before it is planned.

Owns the one reading of both configs. Never opens a weight.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nv_models.config import ModelConfig
from nv_models.pooling.pooler_config import PoolerConfig, bounded
from nv_models.pooling.read_pooler import Asked, read_pooler
from nv_models.read_config import ConfigFiles


class Description(NamedTuple):
    """A model that is known, and not planned."""

    config: ModelConfig
    pooler: PoolerConfig | None
    """Of hidden states, in place of logits; None: it generates text."""
    files: ConfigFiles
    """The contents of both files, for `plan_model`."""


def describe(
    folder: Path,
    hf_overrides: Mapping[str, Any] | None = None,
    *,
    runner: str = "auto",
    convert: str = "auto",
    task: str = "auto",
) -> Description:
    """Read what a model is; the configs first, as they refuse what is not supported.

    Args:
        folder: the result of `resolve`.
        hf_overrides: fields in place of those of config.json.
        runner: "auto", "generate" or "pooling".
        convert: "auto", "none", "embed" or "classify".
        task: vLLM's older option for both.

    Raises:
        FileNotFoundError: the folder has no config.json, or lacks a file that it needs to pool.
        ValueError: as `read_config` and `read_pooler`, or options that contradict each other.
        NotImplementedError: quantized weights.
    """
    files = ConfigFiles.read(folder, hf_overrides)
    config = files.model_config()
    asked = Asked.of(runner, convert, task)
    pooler = read_pooler(folder, config, asked, files.raw)
    return Description(bounded(config, pooler), pooler, files)
