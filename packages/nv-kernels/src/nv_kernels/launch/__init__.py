"""How kernels are launched and compiled: dependent launch, descriptors, sizes, compile_ahead.

The Triton files of every family use it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def compile_ahead() -> AbstractContextManager[None]:
    """Compile, in parallel and without launching, the Triton kernels that a block would launch.

    Use it when a process starts on a card. Results inside the block are undefined: torch must not
    use them as an index.
    """
    module = importlib.import_module("nv_kernels.launch.ahead")  # which imports Triton
    block: AbstractContextManager[None] = module.compile_ahead()
    return block
