"""The fields of config.json that a user changes before it is read: `hf_overrides`.

Owns the check of its form, and how it is merged. Never reads a file.
"""

import json
from collections.abc import Mapping
from typing import Any

ROPES = ("rope_scaling", "rope_parameters")
"""Two spellings of one field: an override in the one replaces the other as well."""


def plain_overrides(overrides: object) -> dict[str, Any] | None:
    """A copy of the overrides that holds nothing but JSON; None: there are none.

    Raises:
        ValueError: not a dict of names, or a value that is not JSON.
    """
    if overrides is None:
        return None
    if callable(overrides):
        raise ValueError(
            "hf_overrides is a function: it must be a dict of fields of config.json, as a function "
            "cannot be sent to other processes"
        )
    if not isinstance(overrides, Mapping) or not all(isinstance(name, str) for name in overrides):
        raise ValueError(
            f"hf_overrides is {overrides!r:.200}: it must be a dict of fields of config.json"
        )
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(overrides), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"hf_overrides must hold values of JSON only: {error}") from error
    return copy


def merged(raw: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """config.json with the overrides in it.

    As in vLLM, a field replaces the file's, and only a config inside the config (`text_config`) is
    merged field by field. So the parameters of a rope are given whole.
    """
    values = dict(raw)
    for name, value in (overrides or {}).items():
        inner = values.get(name)
        if name.endswith("_config") and isinstance(inner, Mapping) and isinstance(value, Mapping):
            values[name] = merged(inner, value)
            continue
        if name in ROPES:
            for each in ROPES:
                values.pop(each, None)
        values[name] = value
    return values
