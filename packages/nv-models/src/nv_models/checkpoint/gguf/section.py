"""One section of a GGUF file's metadata, read by type.

Owns the errors, which name the file, the key, its value, what it must be, and the fix. Never uses
a value.
"""

import math
import reprlib
from dataclasses import dataclass

from nv_models.checkpoint.gguf.header import AGAIN, Header, Value


@dataclass(frozen=True)
class Section:
    """The keys of a header that begin with a name and a dot; a key with a default may be missing.

    Every method raises ValueError for a key that is not there and has no default, and for a value
    of another type.
    """

    header: Header
    name: str

    def value(self, key: str, default: Value = None) -> Value:
        """Whatever the key holds."""
        return self.header.metadata.get(f"{self.name}.{key}", default)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._given(key, default)
        if not is_integer(value) or value < 1:
            raise self.error(key, value, "a positive integer")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive real number."""
        value = self._given(key, default)
        if not is_number(value) or not 0 < value < math.inf:
            raise self.error(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._given(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._given(key, default)
        if not is_text(value):
            raise self.error(key, value, "a string of UTF-8")
        return str(value)

    def texts(self, key: str) -> list[str]:
        """A list of strings, at least one."""
        value = self._given(key, None)
        if not isinstance(value, list) or not value or not all(map(is_text, value)):
            raise self.error(key, value, "a list of strings of UTF-8")
        return value

    def numbers(self, key: str, count: int) -> list[float]:
        """A list of `count` numbers."""
        value = self._given(key, None)
        if not isinstance(value, list) or len(value) != count or not all(map(is_number, value)):
            raise self.error(key, value, f"a list of {count} numbers, one per token")
        return value

    def index(self, key: str, count: int) -> int | None:
        """An integer from 0 to `count` - 1; None where the key is not there."""
        value = self.value(key)
        if value is None or (is_integer(value) and 0 <= value < count):
            return None if value is None else int(value)
        raise self.error(key, value, f"the id of one of the {count} tokens")

    def error(self, key: str, value: Value, expected: str) -> ValueError:
        """The error to raise for a value that is not the expected one."""
        return ValueError(
            f"{self.header.file}: {self.name}.{key} is {shown(value)}: it must be {expected}; "
            f"{AGAIN}"
        )

    def _given(self, key: str, default: Value) -> Value:
        value = self.value(key, default)
        if value is None:
            raise ValueError(f"{self.header.file} lacks the metadata {self.name}.{key}; {AGAIN}")
        return value


def shown(value: Value) -> str:
    """A value, shortened; of a list, how long it is as well."""
    if isinstance(value, list):
        return f"{reprlib.repr(value)} ({len(value)} values)"
    return reprlib.repr(value)


def is_text(value: Value) -> bool:
    """A string that was UTF-8 in the file."""
    if not isinstance(value, str):
        return False
    return value.isascii() or not any("\udc80" <= each <= "\udcff" for each in value)


def is_integer(value: Value) -> bool:
    """An integer, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Value) -> bool:
    """A number, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)
