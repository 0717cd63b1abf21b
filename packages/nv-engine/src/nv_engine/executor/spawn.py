"""A spawned rank: a process of this host, as the process that started it sees it, and its own main.

Owns its start, its pipe and its end. Never looks into a message.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from nv_engine.executor.member import RankSpec, serve

PARENT_CHECK_SECONDS = 0.5
ENDING_SECONDS = 1.0
REAP_SECONDS = 5.0
"""For the system to take down a killed process; a driver may take a while to free a card."""
ENTRY = "from nv_engine.executor.spawn import main; main()"


class SpawnedRank:
    """A rank in a process of its own.

    It is not a fork, and does not import the caller's main module again: a script needs no
    `if __name__ == "__main__"`.
    """

    def __init__(self, spec: RankSpec) -> None:
        """Start the process."""
        self.number = spec.rank
        self.connection, theirs = Pipe()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", ENTRY, str(theirs.fileno()), str(os.getpid())],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(spec.num_threads)},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,  # the terminal's Ctrl-C is for the parent alone
        )
        try:
            theirs.close()
            self.connection.send_bytes(pickle.dumps(spec))
        except BaseException:
            self.kill()  # the caller has no handle yet
            raise

    @property
    def process_id(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def place(self) -> str:
        """Where it runs, for a message."""
        return f"process {self._process.pid}"

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
        """How a process that closed its pipe ended."""
        self.wait(ENDING_SECONDS)
        code = self._process.poll()
        if code is None:
            return "it closed its pipe"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"


def main() -> None:
    """Run a rank: the arguments are its pipe's file number and its parent's process id."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    connection, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        spec: RankSpec = pickle.loads(connection.recv_bytes())
        _worker = serve(connection, spec)
    except BaseException:  # reported, if the parent still reads
        os._exit(1)
    os._exit(0)  # at once: nothing here outlives the process, and taking torch down takes a second


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, whatever it waits for."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)
