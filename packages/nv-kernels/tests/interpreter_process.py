"""A process that runs test modules in Triton's interpreter, one after another.

Owns that process: its start takes longer than the tests of most modules. Each process of tests has
one, from its first module to its end.
"""

import atexit
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


class InterpreterProcess:
    """The process, seen by the tests that need it."""

    def __init__(self) -> None:
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("NV_REQUIRE_GPU", None)
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  `end` closes it
        self.process = subprocess.Popen(
            [sys.executable, __file__], env=environment, cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip
        atexit.register(self.end)

    def run(self, module: str) -> tuple[int, str]:
        """Run a module's tests; return pytest's exit code, or the process's if it ended."""
        start = os.fstat(self.log.fileno()).st_size
        print(module, file=self.process.stdin, flush=True)
        code = self.process.stdout.readline()
        if not code:
            running_interpreter.cache_clear()
            code = self.process.wait()
        size = os.fstat(self.log.fileno()).st_size - start
        # Not by `read`, which would move the position where the process writes.
        return int(code), os.pread(self.log.fileno(), size, start).decode(errors="replace")

    def end(self) -> None:
        """End the process, which reads to the end of its input."""
        self.process.communicate()
        self.log.close()


running_interpreter = cache(InterpreterProcess)


def serve() -> None:
    """Run the modules that are named on standard input; answer each with pytest's exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        code = pytest.main(["-q", "-p", "no:cacheprovider", line.rstrip("\n")])
        print(int(code), file=answers, flush=True)


if __name__ == "__main__":
    serve()
