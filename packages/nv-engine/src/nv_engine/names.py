"""Names: vLLM's keywords that we do not have, and what becomes of each.

Owns the rule and its sentences; each class and method that takes keywords has its own table.
"""

import difflib
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from functools import wraps
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any, ParamSpec, TypeVar, cast

from nv_engine.calls import Shape
from nv_engine.user_line import warn_user
from nv_engine.values import plain, shown

ALIKE = 0.75
"""How alike an unknown name and its hint are, of 1: a less similar name mostly means another."""
Kind = TypeVar("Kind", bound=type)
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ForeignNames:
    """vLLM's keywords that some class or method does not have.

    Attributes:
        no_difference: those that change nothing here, whatever their value.
        unbuilt: those that would change something: the values, besides None and lists of such
            values, that ask for nothing.
        renamed: names of other libraries, and ours.
        elsewhere: names of values that another class takes, and that class; they win over
            `unbuilt`.
        instead: what there is in place of some that are not built, as advice.
        advice: the same for other names, which no keyword here means exactly.
    """

    no_difference: frozenset[str] = frozenset()
    unbuilt: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    advice: Mapping[str, str] = field(default_factory=dict)

    def ignored(self, owner: str, given: Mapping[str, Any], ours: Collection[str]) -> list[str]:
        """The keywords that are given without effect, in order.

        Args:
            owner: the class or method that takes the keywords.
            given: the keywords and their values.
            ours: the owner's own.

        Raises:
            TypeError: an unknown keyword; the message names the nearest known one.
            NotImplementedError: one that asks for what is not built; it names what there is.
        """
        foreign = sorted(given.keys() - set(ours))
        for name in foreign:
            if name not in self.no_difference:
                self._check_unbuilt(owner, name, given[name], ours)
        return foreign

    def fields_of(self, kind: Kind) -> Kind:
        """A dataclass, made to take these names too; each of its fields must have a default.

        The values go into an object without `__setattr__`, and `__post_init__` checks them.
        """
        defaults = {each.name: each.default for each in fields(kind)}

        @wraps(vars(kind)["__init__"])
        def init(instance: Any, /, *args: object, **given: Any) -> None:  # noqa: ANN401
            if args:
                raise TypeError(
                    f"{kind.__name__} takes no positional arguments: name each, such as "
                    f"{next(iter(defaults))}={shown(args[0])}"
                )
            if not defaults.keys() >= given.keys():
                given = self._ours(kind.__name__, given, defaults)
            vars(instance).update(defaults)
            vars(instance).update(given)
            instance.__post_init__()

        kind.__init__ = init  # type: ignore[misc]
        return kind

    def arguments_of(self, function: Callable[P, R]) -> Callable[P, R]:
        """A function, made to take these names too, and to report in plain words what is missing.

        A coroutine function stays one, and so does an async generator function: their arguments are
        checked at the first `await`.
        """
        shape = Shape.of(function)
        work: Any = function

        def kept(num_placed: int, given: dict[str, Any]) -> dict[str, Any]:
            if not (shape.takes_any_name or shape.names >= given.keys()):
                given = self._ours(shape.owner, given, shape.names)
            shape.check(num_placed, given)
            return given

        async def call_async(*args: Any, **given: Any) -> Any:  # noqa: ANN401
            return await work(*args, **kept(len(args), given))

        async def generate(*args: Any, **given: Any) -> AsyncGenerator[Any]:  # noqa: ANN401
            async with aclosing(work(*args, **kept(len(args), given))) as items:
                async for item in items:
                    yield item

        def call(*args: P.args, **given: P.kwargs) -> R:
            return function(*args, **kept(len(args), given))

        if iscoroutinefunction(function):
            return cast("Callable[P, R]", wraps(function)(call_async))
        if isasyncgenfunction(function):
            return cast("Callable[P, R]", wraps(function)(generate))
        return wraps(function)(call)

    def no_arguments_of(self, method: Callable[[T], R]) -> Callable[[T], R]:
        """As `arguments_of`, for a method without arguments whose result must reach its caller.

        A call with `*` or `**` is where CPython 3.11 runs signal handlers, after the method has
        returned: an exception of theirs would lose the result. A plain call is not.
        """
        shape = Shape.of(method)

        @wraps(method)
        def call(instance: T, /, *args: object, **given: object) -> R:
            if args or given:
                kept = self._ours(shape.owner, given, shape.names) if given else {}
                shape.check(1 + len(args), kept)
            return method(instance)

        return call

    def _ours(self, owner: str, given: Mapping[str, Any], ours: Collection[str]) -> dict[str, Any]:
        """The keywords that are the owner's own; of the others the user's line is warned."""
        ignored = self.ignored(owner, given, ours)
        warn_user(f"accepted without effect: {', '.join(ignored)}")
        return {name: value for name, value in given.items() if name in ours}

    def _check_unbuilt(
        self,
        owner: str,
        name: str,
        value: Any,  # noqa: ANN401
        ours: Iterable[str],
    ) -> None:
        if name not in self.unbuilt:
            raise TypeError(f"{owner} has no option {name!r}: {self._hint(name, value, ours)}")
        if _asks_for_nothing(plain(value), self.unbuilt[name]):
            return
        if name in self.elsewhere:
            raise TypeError(f"{owner} has no option {name!r}: {self._hint(name, value, ours)}")
        raise NotImplementedError(
            f"{name}={shown(value)} is not built yet: {self._advice_for_unbuilt(name)}"
        )

    def _advice_for_unbuilt(self, name: str) -> str:
        return self.instead.get(name, f"leave {name} out")

    def _hint(self, name: str, value: object, ours: Iterable[str]) -> str:
        """Advice about a name that is not known."""
        if name in self.elsewhere:
            return f"pass {self.elsewhere[name]}({name}={shown(value)})"
        known = sorted(set(ours) - {"self"})
        names = [*known, *self.no_difference, *self.unbuilt]
        nearest = [self.renamed[name]] if self.renamed.get(name) in known else []
        if not nearest and name in self.advice:
            return self.advice[name]
        nearest += difflib.get_close_matches(name, names, n=1, cutoff=ALIKE)
        if not nearest:
            return f"there are {', '.join(known)}" if known else "it takes no arguments"
        hint = f"did you mean {nearest[0]!r}?"
        if nearest[0] in self.unbuilt:
            hint += f" It is not built yet: {self._advice_for_unbuilt(nearest[0])}"
        return hint


def _asks_for_nothing(value: Any, nothing: tuple[Any, ...]) -> bool:  # noqa: ANN401
    if value is None or _is_among(value, nothing):
        return True
    return isinstance(value, list | tuple) and all(
        item is None or _is_among(item, nothing) for item in value
    )


def _is_among(value: Any, values: tuple[Any, ...]) -> bool:  # noqa: ANN401
    """Whether a value is one of some; one that cannot be compared, as a tensor, is none."""
    try:
        return value in values
    except Exception:  # whatever the comparison of a user's class raises
        return False
