"""Compiles kernels before they are needed, several at a time.

Owns the processes that compile. Their results reach this process through Triton's cache on disk, so
that the first run on a machine takes the time of its slowest kernels instead of the sum of all.
Threads would not help: Triton's compiler holds the interpreter's lock most of the time.
"""

# Triton has no public hook: every launch calls these methods.
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

IS_COLLECTING = threading.Lock()  # only one thread at a time may replace Triton's methods
EMPTY = (torch.empty, torch.empty_like, torch.Tensor.new_empty)
TIME_LIMIT = 120.0  # seconds; the kernels that remain are compiled at their first launch


class Kernel(NamedTuple):
    """One specialisation of a kernel, not compiled yet.

    Attributes:
        source: the source that Triton compiles.
        target: the card.
        options: options of Triton's backend.
        launcher: makes the C function that launches the kernel, which must be compiled too.
    """

    source: Any
    target: Any
    options: Any
    launcher: Any = None

    def compile(self) -> None:
        """Compile, and store the result on disk."""
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
    """Makes new tensors zero, because the kernels that would fill them are not launched."""

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

    It compiles the last ones first: the block should end with the kernels that take longest.

    Inside the block this thread launches no kernel, and its new tensors are zeros, because torch
    may use as an index what a kernel would have written. Other threads launch as usual; a second
    thread that enters a block waits for the first.
    """
    kernels: dict[Hashable, Kernel] = {}
    with IS_COLLECTING, _collected(kernels):
        yield
    missing = [kernel for kernel in reversed(kernels.values()) if not kernel.is_on_disk]
    compile_in_parallel(missing)


@contextmanager
def _collected(kernels: dict[Hashable, Kernel]) -> Generator[None]:
    """Collect what this thread would launch, instead of launching it."""
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
    """Compile in forked processes, one per processor; a kernel that fails compiles at its launch.

    Args:
        kernels: the kernels, the slowest first; a process takes the next one when it is done.
        time_limit: seconds after which processes that still run are stopped.
    """
    number = min(len(os.sched_getaffinity(0)), len(kernels))
    fork = multiprocessing.get_context("fork")
    taken = fork.Value("i", 0)
    children = [
        fork.Process(target=_compile_all, args=(kernels, taken), daemon=True) for _ in range(number)
    ]
    with warnings.catch_warnings():  # Python 3.12 warns about a fork with threads
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
