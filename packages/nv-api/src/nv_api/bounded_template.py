"""Bounded template: a chat template, compiled by transformers and rendered within bounds.

Owns how much a template may write and count: it is a program, and a small mistake in it makes a
text that no memory holds, or runs for hours. Never decides what a template gets.
"""

import operator
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateRuntimeError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import SandboxedEnvironment

NUM_TEMPLATES = 32
"""Templates that are cached, compiled."""
MOST_OWN = 1 << 20
"""Characters that a template may write whatever the conversation, and most of a product."""
MOST_OF_EACH = 16
"""How many more it may write for each character of the conversation and the other variables."""
MOST_OF_SUM = 1 << 26
"""Characters, or items, of two values that are added."""
MOST_COUNTED = 1_000_000
"""Items of all ranges of one rendering."""
MOST_EXPONENT = 1000


@lru_cache(NUM_TEMPLATES)
def compiled(template: str) -> "Template":
    """A template, compiled as in vLLM and with bounds.

    Raises:
        TemplateSyntaxError: it is not Jinja.
    """
    return _environment().from_string(template)


def rendered(template: str, variables: Mapping[str, Any]) -> str:
    """The text that a template makes of variables.

    Raises:
        TemplateError: the template refuses them, or writes too many characters.
        Exception: of one of its expressions; OverflowError where that is too large.
    """
    parts, length, most = [], 0, MOST_OWN
    for part in compiled(template).generate({"range": _range(), **variables}):
        parts.append(part)
        length += len(part)
        if length > most == MOST_OWN:
            most += MOST_OF_EACH * len(repr(variables))
        if length > most:
            raise TemplateRuntimeError(
                f"it writes more than {most} characters, which are {MOST_OWN} and {MOST_OF_EACH} "
                "for each of the conversation: correct it"
            )
    return "".join(parts)


@cache
def _environment() -> "SandboxedEnvironment":
    """The environment of transformers, with bounds on what an expression makes."""
    from transformers.utils import chat_template_utils  # noqa: PLC0415  # seconds to import

    environment: SandboxedEnvironment = chat_template_utils._compile_jinja_template("").environment
    bounded = {"+": _sum, "*": _product, "**": _power}
    environment.binop_table = {**environment.binop_table, **bounded}
    environment.intercepted_binops = frozenset(bounded)
    return environment


def _sum(left: Any, right: Any) -> Any:  # noqa: ANN401  # whatever a template adds
    if _size(left) + _size(right) > MOST_OF_SUM:
        raise OverflowError(f"the sum of two texts or lists has more than {MOST_OF_SUM} items")
    return operator.add(left, right)


def _product(left: Any, right: Any) -> Any:  # noqa: ANN401
    for several, count in ((left, right), (right, left)):
        if isinstance(count, int) and _size(several) * count > MOST_OWN:
            raise OverflowError(f"a text or a list times {count} has more than {MOST_OWN} items")
    return operator.mul(left, right)


def _power(left: Any, right: Any) -> Any:  # noqa: ANN401
    if isinstance(right, int) and right > MOST_EXPONENT:
        raise OverflowError(f"the exponent is {right}: it must be at most {MOST_EXPONENT}")
    return operator.pow(left, right)


def _size(value: object) -> int:
    """The length of a text or a list; 0 of anything else."""
    return len(value) if isinstance(value, str | list | tuple) else 0


def _range() -> Callable[..., range]:
    """Python's `range` for one rendering, whose ranges together have MOST_COUNTED items."""
    left = MOST_COUNTED

    def counted(*bounds: int) -> range:
        nonlocal left
        asked = range(*bounds)
        if asked:
            left -= 1 + (asked[-1] - asked[0]) // asked.step  # its len is bounded
        if left < 0:
            raise OverflowError(f"the template counts further than {MOST_COUNTED}")
        return asked

    return counted
