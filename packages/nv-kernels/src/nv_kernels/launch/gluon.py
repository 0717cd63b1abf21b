"""Modules with kernels in Gluon, which is experimental: each is imported only where it can be."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


@cache
def gluon_module(name: str) -> ModuleType | None:
    """Import a module with a Gluon kernel; None if this Triton has another version of Gluon.

    Args:
        name: the module's, without the package's.
    """
    try:
        return importlib.import_module(f"nv_kernels.{name}")
    except ImportError:
        return None
