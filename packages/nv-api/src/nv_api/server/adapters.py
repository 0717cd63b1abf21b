"""ServedAdapters: the adapters that requests select by name, as if each were a model.

Owns their names and ids. Never reads a file: the engine does.
"""

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from nv_engine import LoRARequest
from nv_engine.values import shown

from nv_api.server.errors import INVALID, ApiError, invalid, refusals

if TYPE_CHECKING:
    from nv_api.server.llm import ServedLLM


class ServedModel(NamedTuple):
    """The model or the adapter that a request names."""

    name: str
    """As a response has it."""
    lora: LoRARequest | None = None
    """None: the base model alone."""


class ServedAdapters:
    """Adapters by name; they may change while the server runs.

    Args:
        modules: those that the server is started with, of different names and ids.
        taken: names of the base model.
    """

    def __init__(self, modules: Iterable[LoRARequest], taken: Iterable[str]) -> None:
        self._by_name = {module.lora_name: module for module in modules}
        self._taken = frozenset(taken)
        self._changing: set[str] = set()
        self._next_id = max([each.lora_int_id for each in self], default=0) + 1

    def __iter__(self) -> Iterator[LoRARequest]:
        return iter(tuple(self._by_name.values()))

    @property
    def names(self) -> tuple[str, ...]:
        """In the order in which they were added."""
        return tuple(self._by_name)

    def find(self, name: str) -> LoRARequest | None:
        """The adapter of a name."""
        return self._by_name.get(name)

    async def check(self, llm: "ServedLLM") -> None:
        """Have the engine compare each adapter with the model and begin to read it.

        Raises:
            ValueError: one does not fit.
        """
        for module in self:
            try:
                await llm.add_lora(module)
            except (ValueError, FileNotFoundError) as error:
                raise ValueError(f"lora_modules {module.lora_name}: {error}") from error

    async def load(self, llm: "ServedLLM", name: str, path: str, *, in_place: bool) -> None:
        """Offer one more adapter, or with `in_place` another version of one.

        Raises:
            ApiError: 400, the name is taken, or the files are not there or do not fit the model.
        """
        if name in self._taken:
            raise invalid(
                f"lora_name is {shown(name)}, a name of the base model: give another", "lora_name"
            )
        old = self._by_name.get(name)
        if old is not None and not in_place:
            raise invalid(
                f"lora_name is {shown(name)}, and that adapter is loaded already: give another "
                "name, or load_inplace: true to replace it",
                "lora_name",
            )
        async with self._change(name):
            number = self._next_id if old is None else old.lora_int_id
            self._next_id += old is None
            with refusals("lora_path"):
                request = LoRARequest(name, number, path, None, in_place)
                await llm.add_lora(request)
            self._by_name[name] = LoRARequest(name, number, path)

    async def unload(self, llm: "ServedLLM", name: str) -> None:
        """Offer an adapter no longer; requests that run with it go on.

        Raises:
            ApiError: 404, there is none of that name.
        """
        if name not in self._by_name:
            raise ApiError(
                404,
                INVALID,
                f"lora_name is {shown(name)}, which is not a loaded adapter: give one that "
                "/v1/models lists",
                param="lora_name",
                code="adapter_not_found",
            )
        async with self._change(name):
            await llm.remove_lora(self._by_name.pop(name).lora_int_id)

    @asynccontextmanager
    async def _change(self, name: str) -> AsyncIterator[None]:
        """Around a change of one name; a second one at the same time is refused."""
        if name in self._changing:
            raise invalid(
                f"lora_name is {shown(name)}, and another request is changing that adapter: ask "
                "again when it is done",
                "lora_name",
            )
        self._changing.add(name)
        try:
            yield
        finally:
            self._changing.discard(name)
