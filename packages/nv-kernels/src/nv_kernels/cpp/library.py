"""The compiled kernels: made once per machine, kept in the user's cache, loaded with ctypes.

Owns the compiler's command and the library's name, which contains a hash of the sources, the
compiler and the processor.
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
    """Load the kernels, after compiling them if this machine has not yet.

    The compiler is `$CXX`, or the first of c++, g++ and clang++ that is installed. The library is
    kept in `$XDG_CACHE_HOME/nv/kernels`, by default under ~/.cache (`cache_folder` has the others).

    Returns:
        The library, or None if it cannot be made; `why_not` then returns the reason.
    """
    found = _load()
    return None if isinstance(found, str) else found


def why_not() -> str:
    """Return why there is no library, in one phrase; "" if there is one."""
    found = _load()
    return found if isinstance(found, str) else ""


@cache
def _load() -> ctypes.CDLL | str:
    try:
        compiler = find_compiler()
    except ValueError as error:  # shlex names no value
        return f"CXX is {os.environ['CXX']!r}, not a command ({error}): correct or unset it"
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
    """Return the compiler's command: `$CXX` with its arguments if it is set; empty without one."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    commands = (shlex.split(name) for name in names)
    return next((each for each in commands if each and shutil.which(each[0])), [])


def _fingerprint(compiler: list[str]) -> str:
    """Hash sources, compiler and processor, because different machines may share a cache."""
    digest = hashlib.sha256(repr((FLAGS, compiler, platform.machine(), _processor())).encode())
    for path in sorted(SOURCES.glob("*.h")) + sorted(SOURCES.glob("*.cpp")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """Return the processor's features, as the system lists them."""
    described = Path("/proc/cpuinfo")
    if not described.exists():
        return platform.processor()
    lines = described.read_text(encoding="utf-8", errors="replace").splitlines()
    kinds = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def _make(compiler: list[str], path: Path) -> None:
    """Compile, or wait for another thread or process that is already compiling.

    Several compilers at once would each take several times as long.
    """
    with path.with_suffix(".lock").open("w") as turn:
        with contextlib.suppress(OSError):  # a file system without locks: each process compiles
            fcntl.flock(turn, fcntl.LOCK_EX)
        if not path.exists():
            _compile(compiler, path)


def _compile(compiler: list[str], path: Path) -> None:
    """Compile to a temporary file and rename it, so that no process loads an incomplete library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [*compiler, *FLAGS, str(SOURCES / "kernels.cpp"), "-o", str(made)]
        # A compiler writes in the user's language, in whatever bytes.
        subprocess.run(
            command, check=True, capture_output=True, text=True, errors="replace", timeout=SECONDS
        )
        made.replace(path)
