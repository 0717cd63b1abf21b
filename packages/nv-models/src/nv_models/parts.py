"""Parts: work that can be interrupted between them, as a generator; each may come much later.

Owns what a forward pass in parts is. A CUDA graph is captured so, between other work.
"""

from collections.abc import Generator
from typing import TypeAlias, TypeVar

Result = TypeVar("Result")
Parts: TypeAlias = Generator[None, None, Result]
"""Yields after each part but the last, and returns the result."""


def whole(parts: Parts[Result]) -> Result:
    """Run all parts at once."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: Result = end.value
            return result
