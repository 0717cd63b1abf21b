"""Values: what a user gave, as the plain int, float, bool or list that later code relies on.

Owns the conversions and their sentences, which name field, value and range. numpy's and torch's
scalars and arrays are taken by their `tolist`, so neither is imported. Never knows what a field
means.
"""

from collections.abc import Hashable, Iterable, Mapping, Set
from numbers import Real
from operator import index
from typing import Any, TypeVar

T = TypeVar("T")

MAX_COUNT = 2**31 - 1
"""Largest count or token id: what a device keeps it in."""
LARGEST = 3.4e38
"""Largest real number: what fp32 holds."""
NOT_LISTS = str | bytes | bytearray
"""Sequences that are never meant as lists of integers, though some hold them."""
MAX_SHOWN = 200
"""Characters of a value that an error shows."""


def shown(value: object) -> str:
    """A value as an error shows it: its repr, of which a long one is cut."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # of integers with more than 4300 digits
        return f"a {type(value).__name__} too large to show"
    except Exception:  # whatever the repr of a user's class raises
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}… ({len(text)} characters)"


def real(
    name: str,
    value: Any,  # noqa: ANN401  # whatever a user gave
    low: float,
    high: float,
    *,
    above: bool = False,
) -> float:
    """A number in [low, high], or in (low, high] with `above`, as a float."""
    number = value if type(value) is float else plain(value)
    is_real = isinstance(number, Real) and not isinstance(number, bool)
    most = min(high, LARGEST)
    if not (is_real and (low < number if above else low <= number) and number <= most):  # nan too
        bounds = f"{'(' if above else '['}{low:g}, {most:g}]"
        raise ValueError(f"{name} is {shown(value)}: it must be a number in {bounds}")
    return float(number)


def integer(
    name: str,
    value: Any,  # noqa: ANN401  # whatever a user gave
    low: int,
    high: int = MAX_COUNT,
    *,
    hint: str = "",
) -> int:
    """An integer in [low, high], as an int."""
    number = whole(value)
    if number is None or not low <= number <= high:
        raise ValueError(
            f"{name} is {shown(value)}: it must be an integer from {low} to {high}"
            f"{f' ({hint})' if hint else ''}"
        )
    return number


def boolean(name: str, value: object) -> bool:
    """True or False."""
    flag = plain(value)
    if not isinstance(flag, bool):
        raise ValueError(f"{name} is {shown(value)}: it must be True or False")
    return flag


def one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Check that a value is among the choices, which stays as it is."""
    if plain(value) not in choices:
        raise ValueError(
            f"{name} is {shown(value)}: it must be one of {', '.join(map(repr, choices))}"
        )


def token_ids(name: str, value: object) -> list[int]:
    """A list of token ids, of a set in rising order; the vocabulary's bound is the engine's."""
    ids = _items(name, value, "a list of token ids")
    listed = [integer(f"{name} entry", token, 0) for token in ids]
    return sorted(listed) if isinstance(value, Set) else listed


def token_lists(name: str, value: object) -> list[list[int]]:
    """Lists of at least one token id each."""
    lists = []
    for ids in _items(name, value, "a list of lists of token ids"):
        if whole(ids) is not None:
            raise ValueError(
                f"{name} has {shown(ids)}: each entry must be a list, as [{shown(ids)}]"
            )
        lists.append(token_ids(name, ids))
    if not all(lists):
        raise ValueError(f"{name} has an empty entry: each must have a token")
    return lists


def token_biases(name: str, value: object) -> dict[int, float]:
    """A number for each of some token ids."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {shown(value)}: it must be a dict from token ids to numbers")
    return {
        integer(f"{name} entry", token, 0): real(f"{name}[{token}]", bias, -LARGEST, LARGEST)
        for token, bias in value.items()
    }


def texts(name: str, value: object) -> list[str]:
    """A list of non-empty strings that are valid Unicode, of a set in rising order."""
    if isinstance(value, str):
        raise ValueError(
            f"{name} is {shown(value)}: it must be a list of strings, as [{shown(value)}]"
        )
    items = _items(name, value, "a list of strings")
    if not all(isinstance(text, str) and text for text in items):
        raise ValueError(f"{name} is {shown(value)}: each must be a non-empty string")
    for text in items:
        unicode(name, text)
    return sorted(items) if isinstance(value, Set) else items


def unicode(name: str, text: str) -> str:
    """A text; raises ValueError if it has half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has a character that is not valid Unicode at position {error.start}: "
            "decode the text with the encoding it was written in"
        ) from None
    return text


def one_id(name: str, value: T) -> T:
    """An id, of whatever kind; raises TypeError for a list or another value that is none."""
    if not isinstance(value, Hashable):
        raise TypeError(f"{name} is {shown(value)}: it must be one id, so call once for each")
    return value


def _items(name: str, value: object, wanted: str) -> list[Any]:
    """The items of anything that can be iterated, but of no text."""
    items = plain(value)
    if not isinstance(items, NOT_LISTS) and isinstance(items, Iterable):
        try:
            return list(items)
        except TypeError:  # a tensor of no dimension calls itself iterable
            pass
    raise ValueError(f"{name} is {shown(value)}: it must be {wanted}")


def whole(value: Any) -> int | None:  # noqa: ANN401
    """The int that a value stands for; None: it stands for none."""
    if type(value) is int:  # nearly always
        return value
    number = plain(value)
    if isinstance(number, bool):
        return None
    try:
        return index(number)
    except TypeError:
        return None


def plain(value: Any) -> Any:  # noqa: ANN401
    """A scalar or an array of numpy or torch as Python's own; anything else as it is.

    What has no values, as a tensor on the meta device, stays as it is too.
    """
    is_array = hasattr(value, "tolist") and not isinstance(value, type)  # not numpy.float32 itself
    try:
        return value.tolist() if is_array else value
    except (NotImplementedError, RuntimeError):
        return value
