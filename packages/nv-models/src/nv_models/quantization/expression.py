"""Regular expressions for the names of modules, as configs of checkpoints and adapters have them.

Owns the sentences about one that is none, and about one whose match could take for ever. Never
matches a name.
"""

import math
import re
from dataclasses import dataclass

NAME_LENGTH = 64
"""Characters of a module's name, about."""
MAX_STEPS = 2**25
"""That a match may try: four open repetitions of a name, and a choice of two."""
MAX_LENGTH = 2**16
"""Characters of an expression."""
COUNTED = re.compile(r"\{(\d*)(,?)(\d*)\}")


def check_expression(pattern: str, field: str) -> None:
    """Raise ValueError if a pattern of a field is not a regular expression, or costs too much."""
    has = f"{field} has the regular expression {pattern!r:.200}"
    if len(pattern) > MAX_LENGTH:
        raise ValueError(
            f"{has} of {len(pattern)} characters: it must have at most {MAX_LENGTH}; shorten it"
        )
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{has}, which is none ({error}): correct it") from error
    if most_steps(pattern) > MAX_STEPS:
        raise ValueError(
            f"{has}, whose match could take for ever: write it with at most four * or +, and "
            "repeat no group that has a choice or another repetition in it"
        )


@dataclass
class _Group:
    """The contents of an open bracket."""

    num_choices: int = 1
    repeats: bool = False


def most_steps(pattern: str) -> float:
    """About how many ways a match may try before it gives up; infinite: their number doubles.

    Python's `re` tries one way after the other, and holds all threads meanwhile.
    """
    steps, groups, position = 1.0, [_Group()], 0
    closed: _Group | None = None  # the group that ended just before
    while position < len(pattern):
        char, before, closed = pattern[position], closed, None
        position += 1
        counted = COUNTED.match(pattern, position - 1) if char == "{" else None
        if char == "\\":
            position += 1
        elif char == "[":
            position = _end_of_set(pattern, position)
        elif char == "(":
            groups.append(_Group())
            position += pattern[position : position + 1] == "?"  # no repetition
        elif char == "|":
            groups[-1].num_choices += 1
        elif char == ")" and len(groups) > 1:
            closed = groups.pop()
            steps *= closed.num_choices
            groups[-1].repeats |= closed.repeats
        elif char in "*+?" or counted:
            position = counted.end() if counted else position
            position += pattern[position : position + 1] in ("?", "+")  # lazy, or possessive
            times = _times(char, counted)
            if before and times > 1 and char != "?" and (before.repeats or before.num_choices > 1):
                return math.inf
            steps *= times
            groups[-1].repeats = True
    return steps * groups[0].num_choices


def _end_of_set(pattern: str, position: int) -> int:
    """The place after a set of characters, whose bracket is before `position`."""
    position += pattern[position : position + 1] == "^"
    position += pattern[position : position + 1] == "]"
    while position < len(pattern) and pattern[position] != "]":
        position += 2 if pattern[position] == "\\" else 1
    return position + 1


def _times(char: str, counted: re.Match[str] | None) -> float:
    """Between how many numbers of repetitions a quantifier chooses; of {n} the number itself."""
    if counted is None:
        return 2 if char == "?" else NAME_LENGTH
    least, comma, most = counted.groups()
    if not comma:
        return min(int(least or 1), NAME_LENGTH)
    if not most:
        return NAME_LENGTH
    return min(int(most), NAME_LENGTH) - min(int(least or 0), NAME_LENGTH) + 1
