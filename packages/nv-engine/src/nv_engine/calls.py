"""Calls: whether a call's arguments fit a function, in the field's words instead of Python's.

Owns the sentences. Never knows what an argument means.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The arguments of a function or method, `self` among them.

    Attributes:
        owner: the function's name; of `__init__` its class.
        by_place: those that may be given by position, in order.
        required: those of them without a default: the first ones.
        names: all.
        takes_any_name: there is a `**`.
    """

    owner: str
    by_place: tuple[str, ...]
    required: tuple[str, ...]
    names: frozenset[str]
    takes_any_name: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Shape":
        """The shape of a function without `*` arguments."""
        parameters = signature(function).parameters.values()
        *_, outer, name = ["", *function.__qualname__.split(".")]
        placed = [each for each in parameters if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
        any_name = [each.name for each in parameters if each.kind is Parameter.VAR_KEYWORD]
        return cls(
            outer if name == "__init__" else name,
            tuple(each.name for each in placed),
            tuple(each.name for each in placed if each.default is Parameter.empty),
            frozenset(each.name for each in parameters) - {*any_name},
            bool(any_name),
        )

    def check(self, num_placed: int, named: Collection[str]) -> None:
        """Check the number and the names of a call's arguments; unknown names are not looked at.

        Args:
            num_placed: arguments given by position, `self` among them.
            named: names of the others.

        Raises:
            TypeError: too many by position, one given twice, or one that is missing.
        """
        if num_placed > len(self.by_place):
            raise TypeError(self._too_many(num_placed))
        if twice := [name for name in self.by_place[:num_placed] if name in named]:
            raise TypeError(
                f"{self.owner} got {twice[0]} twice, by position and by name: give it once"
            )
        if missing := [name for name in self.required[num_placed:] if name not in named]:
            raise TypeError(
                f"{self.owner} lacks {' and '.join(missing)}: call "
                f"{self.owner}({', '.join(self._without_self(self.required))})"
            )

    def _too_many(self, num_placed: int) -> str:
        """The error of a call with too many arguments by position."""
        known = self._without_self(self.by_place)
        given = num_placed - (len(self.by_place) - len(known))
        if not known:
            return f"{self.owner} takes no arguments by position and got {given}: leave them out"
        has_more = self.takes_any_name or len(self.names) > len(self.by_place)
        others = "give the others by name" if has_more else "leave the others out"
        return (
            f"{self.owner} takes at most {len(known)} by position ({', '.join(known)}) and got "
            f"{given}: {others}"
        )

    def _without_self(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return names[1:] if names[:1] == ("self",) else names
