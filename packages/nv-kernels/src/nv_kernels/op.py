"""An op: its definition in plain torch, and the modules of its faster versions.

Owns the only choice by device. A version's module is imported at the first call with a tensor of
its device: until then neither Triton nor a C++ compiler is needed.
"""

from __future__ import annotations

import importlib
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch


class OnDevice(Protocol):
    """A tensor or a KV cache."""

    @property
    def device(self) -> torch.device:
        """The device that holds it."""


First = TypeVar("First", bound=OnDevice)
Rest = ParamSpec("Rest")
Result = TypeVar("Result")


class Op(Generic[First, Rest, Result]):
    """A function that runs its definition, or the version for its first argument's device.

    Attributes:
        definition: the op in plain torch, on any device.
        modules: for each type of device, the module of its version, which has the op's name.
    """

    def __init__(
        self,
        definition: Callable[Concatenate[First, Rest], Result],
        modules: Mapping[str, str],
    ) -> None:
        update_wrapper(self, definition)
        self.definition = definition
        self.modules = modules
        self._versions: dict[str, Callable[Concatenate[First, Rest], Result]] = {}

    def __call__(self, first: First, /, *rest: Rest.args, **named: Rest.kwargs) -> Result:
        """Run the op on the device of its first argument, which must be positional."""
        device = first.device.type
        version = self._versions.get(device) or self._find(device)
        return version(first, *rest, **named)

    def _find(self, device: str) -> Callable[Concatenate[First, Rest], Result]:
        version = self.definition
        if device in self.modules:
            module = importlib.import_module(self.modules[device])
            version = vars(module)[self.definition.__name__]
        self._versions[device] = version
        return version


def op(
    *, triton: str | None = None, cpp: str | None = None
) -> Callable[[Callable[Concatenate[First, Rest], Result]], Op[First, Rest, Result]]:
    """Make an op from a definition.

    Args:
        triton: the module of its Triton version, for CUDA tensors.
        cpp: the module of its C++ version, for tensors on a CPU.

    Returns:
        A decorator. Each module has a function with the definition's name and parameters. A device
        without a module runs the definition.
    """
    modules = {
        device: module for device, module in (("cuda", triton), ("cpu", cpp)) if module is not None
    }

    def decorate(
        definition: Callable[Concatenate[First, Rest], Result],
    ) -> Op[First, Rest, Result]:
        return Op(definition, modules)

    return decorate


class Reference:
    """The definitions of ops: `reference.rms_norm` is the definition of the op `rms_norm`."""

    def __init__(self, names: Mapping[str, object], **others: Callable[..., Any]) -> None:
        """Collect the definitions as attributes.

        Args:
            names: a module's names; all but the ops are ignored.
            **others: definitions that do not belong to an op.
        """
        ops = {name: each.definition for name, each in names.items() if isinstance(each, Op)}
        vars(self).update(ops | others)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Raise AttributeError: Python calls this for a name that is not an attribute."""
        raise AttributeError(f"{name} is not the name of an op")
