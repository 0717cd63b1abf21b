"""Modules that a quantized checkpoint leaves in floats.

Owns the match of their names, of which configs give whole ones, a beginning or an end. Never reads
a config.
"""

import re
from collections.abc import Sequence
from functools import cache, lru_cache

from nv_models.quantization.expression import check_expression

PLAIN = re.compile(r"[\w.]*")


def is_ignored(module: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches a module.

    A pattern is some parts of the name (`lm_head`, `mlp.gate`, `model.layers.3`), or a regular
    expression for its beginning. Dots at the ends of parts do not count (`mlp.gate.`): tools that
    look for a piece of text write them, so that `model.layers.1.` does not mean layer 10 too.

    Raises:
        ValueError: the match of an expression could take for ever.
    """
    return _is_ignored(module, tuple(patterns))


@lru_cache(1 << 16)  # a mixture of experts has tens of thousands of modules, each asked for thrice
def _is_ignored(module: str, patterns: tuple[str, ...]) -> bool:
    whole = f".{module}."
    return any(f".{each.strip('.')}." in whole for each in patterns) or any(
        each.match(module) is not None for each in _expressions(patterns)
    )


@cache
def _expressions(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """Those that match whole parts of a name from its beginning on.

    A plain name is none: its dots would match any character, and `layers.1.` layer 10.
    """
    found = []
    for pattern in patterns:
        if PLAIN.fullmatch(pattern):
            continue
        try:
            found.append(re.compile(rf"(?:{pattern})(?:\.|$)"))
        except (re.error, RecursionError, OverflowError):  # not an expression
            continue
        check_expression(pattern, "the list of modules in floats")
    return tuple(found)
