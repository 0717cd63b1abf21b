"""Warnings that name the line of the user's program from which a method was called.

Owns how far up the stack that line is: calls reach a warning on ways of different lengths.
"""

import sys
import warnings

PACKAGES = ("nv_api", "nv_engine")


def warn_user(message: str) -> None:
    """Warn of the nearest line on the stack that is not in our packages."""
    level, frame = 2, sys._getframe(1)  # stacklevel 2 is this function's caller
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES
