"""Fields of a checkpoint's JSON files, read by type.

Owns the errors, which name the field, its value and what it must be; the caller adds the file's
name. Never uses a value.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nv_models.missing import why_missing
from nv_models.pointer import refuse_pointer

LARGEST_SIZE = 2**31 - 1
"""Sizes are kept in 32 bits; a larger one is a mistake."""
MOST = {
    "head_dim": 65536,
    "num_hidden_layers": 2048,
    "num_experts": 8192,
    "num_local_experts": 8192,
    "num_labels": 2**20,
}
"""Of what each is a Python object, or is computed before the weights are compared with the files:
many times what models have."""


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, with errors that name it."""
    content = read_value(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} is a JSON {type(content).__name__}: it must be an object")
    return content


def read_value(file: Path) -> Any:  # noqa: ANN401  # whatever the file holds
    """A JSON value from a file, with errors that name it.

    The file may begin with a byte order mark, which some editors write.
    """
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} {why_missing(file, 'does not exist')}; a model folder holds config.json, "
            "weights and the tokenizer's files"
        )
    refuse_pointer(file)
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise ValueError(f"{file} is nested too deeply: download it again") from None
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); download it again") from error


@contextmanager
def naming(file: Path | str) -> Iterator[None]:
    """Put a file's name before an error about its contents."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    except NotImplementedError as error:
        raise NotImplementedError(f"{file}: {error}") from error


def size(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer; null or a missing field means the default, if there is one."""
    value = _given(values, name, default)
    if not _is_integer(value) or value < 1:
        raise ValueError(f"{name} is {value!r:.200}: it must be a positive integer")
    most = MOST.get(name, LARGEST_SIZE)
    if value > most:
        raise ValueError(f"{name} is {value!r:.200}: it must be at most {most}")
    return int(value)


def number(
    values: Mapping[str, Any], name: str, default: float | None = None, at_most: float = math.inf
) -> float:
    """A positive real number; null or a missing field means the default, if there is one."""
    value = _given(values, name, default)
    if not _is_number(value) or not (_is_finite(value) and value > 0):
        raise ValueError(f"{name} is {value!r:.200}: it must be a positive number")
    if value > at_most:
        raise ValueError(f"{name} is {value!r:.200}: it must be at most {at_most:g}")
    return float(value)


def optional_number(values: Mapping[str, Any], name: str) -> float | None:
    """A positive real number; null or a missing field means None."""
    return None if values.get(name) is None else number(values, name)


def numbers(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Those of the fields that are there; each must be a finite number."""
    found = {name: values[name] for name in names if values.get(name) is not None}
    for name, value in found.items():
        if not _is_number(value):
            raise ValueError(f"{name} is {value!r:.200}: it must be a number")
        if not _is_finite(value):
            raise ValueError(f"{name} is {value!r:.200}: it must be a finite number")
    return found


def flag(values: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false; null or a missing field means the default."""
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.200}: it must be true or false")
    return default if value is None else value


def token_ids(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """One token id or a list of them; null or a missing field means none."""
    value = values.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_is_integer(each) for each in ids):
        raise ValueError(f"{name} is {value!r:.200}: it must be a token id or a list of them")
    return tuple(ids)


def indices(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """A list of integers of at least 0; null or a missing field means an empty one."""
    value = values.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(_is_integer(each) and each >= 0 for each in value):
        raise ValueError(f"{name} is {value!r:.200}: it must be a list of integers of at least 0")
    return tuple(value)


def strings(values: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A list of strings; null or a missing field means an empty one."""
    value = values.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{name} is {value!r:.200}: it must be a list of strings")
    return tuple(value)


def table(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A JSON object; null or a missing field means an empty one."""
    value = values.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r:.200}: it must be an object")
    return value or {}


def is_same(value: object, neutral: object) -> bool:
    """Equality in which True is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _given(values: Mapping[str, Any], name: str, default: float | None) -> Any:  # noqa: ANN401
    value = values.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{name} is missing")
    return value


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    """Whether a float can hold the number: not NaN, infinity or an integer past the largest."""
    return -sys.float_info.max <= value <= sys.float_info.max
