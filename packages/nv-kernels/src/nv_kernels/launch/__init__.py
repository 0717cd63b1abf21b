"""How kernels are launched and compiled: dependent launch, descriptors, sizes, compile_ahead.

Owns what every family's Triton files need of a card. Never computes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def compile_ahead() -> AbstractContextManager[None]:
    """Compile, in parallel and without launching, the Triton kernels that a block would launch.

    For the start of a process on a card: results inside the block are undefined, and what a
    kernel would have written must not be used as an index by torch.
    """
    module = importlib.import_module("nv_kernels.launch.ahead")  # which imports Triton
    block: AbstractContextManager[None] = module.compile_ahead()
    return block
