"""The compiled kernels: made once a machine, kept in the user's cache, loaded with ctypes.

Owns the compiler's command and the library's name, which says for which sources and processor it
was made. Never passes a tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from nv_kernels.cache_folder import cache_path
from nv_kernels.openmp import end_threads_at_fork

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp")
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120  # for the compiler


def library() -> ctypes.CDLL | None:
    """Compile the kernels, if this machine never did, and load them.

    The compiler is `$CXX`, or the first of c++, g++ and clang++ that is there. The library is kept
    in `$XDG_CACHE_HOME/nv/kernels`, by default under ~/.cache (`cache_folder` has the others).

    Returns:
        The library, or None where it cannot be made; `why_not` then says why.
    """
    found = _load()
    return None if isinstance(found, str) else found


def why_not() -> str:
    """Why there is no library, one phrase; "" if there is one."""
    found = _load()
    return found if isinstance(found, str) else ""


@cache
def _load() -> ctypes.CDLL | str:
    compiler = find_compiler()
    if not compiler:
        return f"{os.environ.get('CXX') or 'a C++ compiler'} was not found; install g++, or set CXX"
    try:
        path = cache_path("kernels", f"{_fingerprint(compiler)}.so")
        if not path.exists():
            _make(compiler, path)
        loaded = ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        return f"{' '.join(compiler)} failed: {error.stderr.strip()[-500:]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(compiler)}: {error}"
    end_threads_at_fork(loaded)
    return loaded


def find_compiler() -> list[str]:
    """The compiler's command, `$CXX` with its arguments if that is set; empty if there is none."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    commands = (shlex.split(name) for name in names)
    return next((each for each in commands if each and shutil.which(each[0])), [])


def _fingerprint(compiler: list[str]) -> str:
    """Name sources, compiler and processor: a cache may be shared by unlike machines."""
    digest = hashlib.sha256(repr((FLAGS, compiler, platform.machine(), _processor())).encode())
    for path in sorted(SOURCES.glob("*.h")) + sorted(SOURCES.glob("*.cpp")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What this processor can do, as the system says."""
    described = Path("/proc/cpuinfo")
    if not described.exists():
        return platform.processor()
    lines = described.read_text(encoding="utf-8", errors="replace").splitlines()
    kinds = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def _make(compiler: list[str], path: Path) -> None:
    """Compile, unless another thread or process does so at this moment: then wait for its library.

    Side by side they would take several times as long, each of them.
    """
    with path.with_suffix(".lock").open("w") as turn:
        with contextlib.suppress(OSError):  # a file system without locks: all compile
            fcntl.flock(turn, fcntl.LOCK_EX)
        if not path.exists():
            _compile(compiler, path)


def _compile(compiler: list[str], path: Path) -> None:
    """Compile beside the target and move it there at once: no other process finds half of it."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [*compiler, *FLAGS, str(SOURCES / "kernels.cpp"), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
        made.replace(path)
