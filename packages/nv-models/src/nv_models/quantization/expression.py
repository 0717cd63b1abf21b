"""Regular expressions for the names of modules, as a quantization_config has them.

Owns the sentence about one that is none. Never matches a name.
"""

import re


def check_expression(pattern: str, field: str) -> None:
    """Raise ValueError if a pattern of a field is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{field} has the regular expression {pattern!r:.200}, which is none ({error}): "
            "correct it"
        ) from error
