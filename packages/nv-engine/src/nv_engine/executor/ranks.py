"""Ranks 1 and up, as the process that spawned them sees them.

Owns the processes and their pipes: start, messages out, signs of life, the end. Never looks into a
message, and knows nothing of rank 0.
"""

import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from nv_engine.executor.rank import RankSpec, Report

POLL_SECONDS = 0.2
SETTLE_SECONDS = 1.0
"""After the first sign of a failure: for the other ranks to say what they know of it."""
ENTRY = "from nv_engine.executor.rank import main; main()"


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    connection: Connection
    stage: str = "started"
    failed: Report | None = None
    is_dead: bool = False


class Ranks:
    """The spawned ranks of one engine. `send` may be called from another thread than the rest."""

    def __init__(self, specs: Sequence[RankSpec]) -> None:
        """Start a process a spec, and wait until all are up.

        They are not forks, and do not import the caller's main module again: a script needs no
        `if __name__ == "__main__"`.

        Raises:
            RuntimeError: a process did not come up.
        """
        self.size = len(specs) + 1
        self._failure: str | None = None
        self._poller = select.poll()
        self._ranks: dict[int, _Rank] = {}  # by the pipe's file number
        try:
            for spec in specs:
                self._start(spec)
            while not self.reached("up"):
                pass
        except BaseException:
            self.kill()
            self.stop(0)
            raise

    def _start(self, spec: RankSpec) -> None:
        ours, theirs = Pipe()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-c", ENTRY, str(theirs.fileno()), str(os.getpid())],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(spec.num_threads)},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,  # the terminal's Ctrl-C is for the parent alone
        )
        self._ranks[ours.fileno()] = _Rank(spec.rank, process, ours)
        self._poller.register(ours.fileno(), select.POLLIN)
        theirs.close()
        ours.send_bytes(pickle.dumps(spec))

    @property
    def process_ids(self) -> list[int]:
        """Of the processes, in order of rank."""
        return [rank.process.pid for rank in self._ranks.values()]

    def send(self, message: bytes) -> None:
        """Give every rank a message; waits only for a rank that is many messages behind.

        Raises:
            OSError: a rank is gone.
        """
        for rank in self._ranks.values():
            rank.connection.send_bytes(message)

    def reached(self, stage: str, timeout: float = POLL_SECONDS) -> bool:
        """True once every rank has said that it is at `stage`; waits a moment for it.

        Raises:
            RuntimeError: a rank failed or died.
        """
        if any(rank.stage != stage for rank in self._ranks.values()):
            self._read(timeout)
            self.check()
        return all(rank.stage == stage for rank in self._ranks.values())

    def check(self) -> None:
        """Raise the RuntimeError that names the rank that failed or died, if one did."""
        if (text := self.failure()) is not None:
            raise RuntimeError(text)

    def failure(self, timeout: float = 0) -> str | None:
        """What ended a rank, or None if all live; waits `timeout` seconds for bad news."""
        if self._failure is None and self._read(timeout):
            deadline = time.monotonic() + SETTLE_SECONDS
            while time.monotonic() < deadline and not all(r.is_dead for r in self._ranks.values()):
                self._read(max(deadline - time.monotonic(), 0))
            self._failure = self._cause()
        return self._failure

    def _read(self, timeout: float) -> bool:
        """Take what the ranks say; True if one of them has ended or is about to."""
        for number, _ in self._poller.poll(timeout * 1000):
            rank = self._ranks[number]
            try:
                report: Report = rank.connection.recv()
            except (EOFError, OSError):
                self._poller.unregister(number)
                rank.is_dead = True
                continue
            rank.stage = report.stage
            rank.failed = report if report.stage == "failed" else None
        return any(rank.is_dead or rank.failed for rank in self._ranks.values())

    def _cause(self) -> str:
        """The first failure: a rank that died without a word, else the earliest traceback."""
        ended = [rank for rank in self._ranks.values() if rank.is_dead or rank.failed]
        first = min(ended, key=lambda rank: rank.failed.time if rank.failed else 0)
        name = f"rank {first.number} of {self.size} (process {first.process.pid})"
        if first.failed:
            return f"{name} failed:\n{first.failed.text}"
        return f"{name} died: {_ending(first.process)}"

    def kill(self) -> None:
        """Let no rank do anything more; a `send` that waits in a thread gets its OSError."""
        for rank in self._ranks.values():
            rank.process.kill()  # nothing happens to one that has ended

    def stop(self, grace: float) -> None:
        """End every process: no more messages, then `grace` seconds, then by force.

        No thread may be in `send`: the file numbers of the pipes are free for others afterwards.
        """
        deadline = time.monotonic() + grace
        try:
            for rank in self._ranks.values():
                rank.connection.close()
            for rank in self._ranks.values():
                _wait(rank.process, deadline - time.monotonic())
        finally:
            self.kill()
            for rank in self._ranks.values():
                rank.process.wait()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(seconds, 0))


def _ending(process: subprocess.Popen[bytes]) -> str:
    """How a process that closed its pipe ended."""
    _wait(process, SETTLE_SECONDS)
    code = process.poll()
    if code is None:
        return "it closed its pipe"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
