"""Lists inside messages: the first few, and how many more there are.

Owns the place where a list is cut. Never depends on the items.
"""

from collections.abc import Sequence


def first_few(items: Sequence[str], most: int = 3) -> list[str]:
    """The first items, and "and N more" as one more item where there are more than `most`."""
    left = len(items) - most
    return [*items[:most], f"and {left} more"] if left > 0 else list(items)
