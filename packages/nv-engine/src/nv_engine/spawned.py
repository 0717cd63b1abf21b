"""A spawned process: a child of this one that runs a function of ours.

Owns its start, as both sides see it, and its end. Never reads or writes what the two share. It is
also the program that the child runs, so it imports nothing but the standard library.
"""

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

PARENT_CHECK_SECONDS = 0.5
ENDING_SECONDS = 1.0
REAP_SECONDS = 5.0
"""For the system to take down a killed process; a driver may take a while to free a card."""


class SpawnedProcess:
    """A new Python process that ends when this one does.

    It is not a fork, and does not import the caller's main module again: a script needs no
    `if __name__ == "__main__"`.

    Args:
        entry: "module:function", called with `shared`. Until it is imported, which may take
            seconds, the process already watches its parent.
        shared: the file number that it inherits, as that of a pipe or a socket.
        environment: variables that it gets beside this process's own.
    """

    def __init__(
        self, entry: str, shared: int, environment: Mapping[str, str] | None = None
    ) -> None:
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, entry, str(shared), str(os.getpid())],
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            stdin=subprocess.DEVNULL,
            pass_fds=[shared],
            process_group=0,  # the terminal's Ctrl-C is for the parent alone
        )

    @property
    def process_id(self) -> int:
        """Of the process."""
        return self._process.pid

    def kill(self) -> None:
        """End it now; nothing happens to one that has ended."""
        self._process.kill()

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for it to end by itself."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(seconds, 0))

    def reap(self) -> None:
        """After `kill`: wait until it is gone, unless the system cannot end it."""
        self.wait(REAP_SECONDS)

    def ending(self) -> str:
        """How a process that closed its end ended."""
        self.wait(ENDING_SECONDS)
        code = self._process.poll()
        if code is None:
            return "it closed its pipe"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"


def main(entry: str, shared: int, parent: int) -> None:
    """Run a spawned process.

    It ignores Ctrl-C, which the parent handles, and ends when the parent is gone, whatever it waits
    for.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    module, _, name = entry.partition(":")
    getattr(importlib.import_module(module), name)(shared)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
