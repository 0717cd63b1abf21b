"""Function: a function that a model may call, and the types that its parameters take.

Owns the reading of a JSON schema for types. Never validates arguments.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

STRING = frozenset(["string"])
_MAX_REFERENCES = 16
"""References that are followed one after the other: a schema may refer to itself."""


@dataclass(frozen=True)
class Function:
    """A function: its name, and the JSON schema of its arguments (None: it takes none)."""

    name: str
    parameters: Mapping[str, Any] | None = None

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the parameters, by name."""
        properties = (self.parameters or {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}

    @property
    def required(self) -> Collection[object]:
        """The names of the parameters that a call must have."""
        required = (self.parameters or {}).get("required")
        return required if isinstance(required, list) else ()

    def types(self, parameter: str) -> frozenset[str]:
        """The JSON types that a parameter takes; of one that names none, "string"."""
        schema = self.properties.get(parameter)
        return _types(schema, self.parameters or {}, _MAX_REFERENCES) or STRING

    def texts(self, parameter: str) -> list[str] | None:
        """The only values that a parameter takes, if all of them are strings; else None."""
        schema, root = self.properties.get(parameter), self.parameters or {}
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                break
            schema = _referred(schema["$ref"], root)
        values = _values(schema) if isinstance(schema, Mapping) else None
        if not values or not all(isinstance(value, str) for value in values):
            return None
        return values


def json_type(value: object) -> str:
    """The JSON type of a value that `json.loads` returned."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "number"
    names = {int: "integer", str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


def _types(schema: object, root: Mapping[str, Any], num_references: int) -> frozenset[str]:
    """The types that a schema names; empty if it names none."""
    if not isinstance(schema, Mapping) or num_references < 0:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset([named])
    if isinstance(named, list):
        return frozenset(each for each in named if isinstance(each, str))
    values = _values(schema)
    if values is not None:
        return frozenset(json_type(value) for value in values)
    parts = [
        schema[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list)
    ]
    inner = [each for part in parts for each in part]
    if "$ref" in schema:
        inner.append(_referred(schema["$ref"], root))
    found = (_types(each, root, num_references - 1) for each in inner)
    return frozenset().union(*found)


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The only values that fit a schema, if it lists them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _referred(reference: object, root: Mapping[str, Any]) -> object:
    """The part of a schema that `#/…` points to; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place: object = root
    for key in reference.removeprefix("#").split("/")[1:]:
        name = key.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, Mapping) else None
    return place
