"""Modules that a quantized checkpoint leaves in floats.

Owns the match of their names, of which configs give whole ones, a beginning or an end. Never reads
a config.
"""

import re
from collections.abc import Sequence


def is_ignored(module: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches a module.

    A pattern is some parts of the name (`lm_head`, `mlp.gate`, `model.layers.3`), or a regular
    expression for its beginning.
    """
    return any(f".{each}." in f".{module}." or _begins(each, module) for each in patterns)


def _begins(pattern: str, module: str) -> bool:
    """Whether a regular expression matches whole parts of the name from its beginning on."""
    try:
        return re.match(rf"(?:{pattern})(?:\.|$)", module) is not None
    except re.error:  # not an expression
        return False
