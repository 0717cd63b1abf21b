"""Compiles kernels before they are needed, several at a time.

Owns the processes that compile. What they make reaches this process through Triton's cache on
disk: a first run on a machine takes the time of its slowest kernels instead of the sum. Threads
would not do: Triton's compiler holds the interpreter's lock most of the time. Never launches.
"""

# Triton offers no public way in: these are the methods that every launch goes through.
# ruff: noqa: ANN401

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
import time
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler.compiler import get_cache_key, make_backend
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable, Sequence
    from multiprocessing.sharedctypes import Synchronized

IS_COLLECTING = threading.Lock()  # Triton's methods are changed for one thread at a time
EMPTY = (torch.empty, torch.empty_like, torch.Tensor.new_empty)
TIME_LIMIT = 120.0  # seconds; what is not compiled by then is compiled at its first launch


class Kernel(NamedTuple):
    """One specialisation of a kernel, not compiled yet.

    Attributes:
        source: what Triton compiles.
        target: the card.
        options: of the backend.
        launcher: makes the C function that launches it, which a compiler has to build too.
    """

    source: Any
    target: Any
    options: Any
    launcher: Any = None

    def compile(self) -> None:
        """Compile, and leave the result on disk."""
        made = triton.compile(self.source, target=self.target, options=self.options.__dict__)
        if self.launcher is not None:
            self.launcher(self.source, made.metadata)

    @property
    def is_on_disk(self) -> bool:
        """True if an earlier process compiled it."""
        backend = make_backend(self.target)
        options = backend.parse_options(self.options.__dict__ | self.source.parse_options())
        variables = get_cache_invalidating_env_vars()
        key = get_cache_key(self.source, backend, options, env_vars=variables)
        manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return bool(manager.get_group(f"{self.source.name[:150]}.json"))


class ZerosForEmpty(TorchFunctionMode):
    """Fills with zeros the tensors that kernels which are not launched would have filled."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        del types
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in EMPTY else result


@contextmanager
def compile_ahead() -> Generator[None]:
    """Compile, at the end of the block, the kernels that the block would have launched.

    The last ones first: let the block end with those that take longest.

    Inside, this thread launches no kernel, and its new tensors are zeros: torch may use as an index
    what a kernel would have written. Other threads launch as ever; a second one that enters waits
    for the first.
    """
    kernels: dict[Hashable, Kernel] = {}
    with IS_COLLECTING, _collected(kernels):
        yield
    missing = [kernel for kernel in reversed(kernels.values()) if not kernel.is_on_disk]
    compile_in_parallel(missing)


@contextmanager
def _collected(kernels: dict[Hashable, Kernel]) -> Generator[None]:
    """Note what this thread would launch, in place of launching it."""
    run, do_compile, collector = JITFunction.run, JITFunction._do_compile, threading.get_ident()

    def never_launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        is_collected = threading.get_ident() == collector
        return run(self, *args, grid=grid, warmup=warmup or is_collected, **options)

    def collect(self: Any, key: Hashable, signature: Any, device: int, *rest: Any) -> Any:
        if threading.get_ident() != collector:
            return do_compile(self, key, signature, device, *rest)
        constants, options, attributes, _ = rest
        source = self.ASTSource(self, signature, constants, attributes)
        target, launcher = driver.active.get_current_target(), driver.active.launcher_cls
        kernels[id(self), device, key] = Kernel(source, target, options, launcher)
        return None

    JITFunction.run, JITFunction._do_compile = never_launch, collect
    try:
        with ZerosForEmpty():
            yield
    finally:
        JITFunction.run, JITFunction._do_compile = run, do_compile


def compile_in_parallel(kernels: Sequence[Kernel], time_limit: float = TIME_LIMIT) -> None:
    """Compile in forked processes, one a processor; a kernel that fails is left to its launch.

    Args:
        kernels: what to compile, the slowest first: a process that is done takes the next.
        time_limit: seconds after which those that still run are stopped.
    """
    number = min(len(os.sched_getaffinity(0)), len(kernels))
    fork = multiprocessing.get_context("fork")
    taken = fork.Value("i", 0)
    children = [
        fork.Process(target=_compile_all, args=(kernels, taken), daemon=True) for _ in range(number)
    ]
    with warnings.catch_warnings():  # Python 3.12 warns of a fork beside threads, such as torch's
        warnings.simplefilter("ignore", DeprecationWarning)
        for child in children:
            child.start()
    deadline = time.monotonic() + time_limit
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()


def _compile_all(kernels: Sequence[Kernel], taken: Synchronized[int]) -> None:
    """Compile kernels that no other process has taken, until none is left."""
    while True:
        with taken.get_lock():
            index = taken.value
            taken.value += 1
        if index >= len(kernels):
            return
        kernels[index].compile()
