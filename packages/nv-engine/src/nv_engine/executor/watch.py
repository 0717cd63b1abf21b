"""RankWatch: the processes of an engine, as the process that started them sees them.

Owns their connections: messages out, reports and signs of life in, and what a failure is called. A
thread reads, because a Ctrl-C that hits the caller must not lose half a report. Never reads a batch
or a result; does not depend on how a rank was started.
"""

import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Protocol

from nv_engine.executor.member import PING, Report
from nv_engine.log import receive

if TYPE_CHECKING:
    from nv_engine.batch import StepResult
    from nv_engine.facts import ModelFacts

POLL_SECONDS = 0.2
STAGES = ("started", "up", "ready")
"""Of a rank that starts, in order."""
SETTLE_SECONDS = 1.0
"""After the first sign of a failure: time for the other ranks to report."""


class RankHandle(Protocol):
    """A started rank."""

    number: int
    connection: Connection

    @property
    def process_id(self) -> int:
        """Of its process, on its own machine."""
        ...

    @property
    def place(self) -> str:
        """Where it runs, for a message: "process 12"."""
        ...

    def kill(self) -> None:
        """End it now; nothing happens to one that has ended."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for it to end by itself, once its connection is closed."""
        ...

    def reap(self) -> None:
        """After `kill`: wait until it is gone, but not for ever."""
        ...

    def ending(self) -> str:
        """How one that closed its connection ended: "exit code 3"."""
        ...


@dataclass
class _Rank:
    handle: RankHandle
    stage: str = "started"
    failed: Report | None = None
    is_dead: bool = False
    num_steps: int = 0
    asked_at: float | None = None
    """When a sign of life was first wanted that has not come."""
    is_asked: bool = False
    is_sending: threading.Lock = field(default_factory=threading.Lock)


class RankWatch:
    """The started ranks of one engine. `send` may be called from another thread than the rest."""

    def __init__(self, handles: Sequence[RankHandle], size: int) -> None:
        """Listen to ranks that have been started, of `size`."""
        self.size = size
        self.facts: ModelFacts | None = None
        """Of the rank that answers, once it is ready."""
        self.results: dict[int, StepResult] = {}
        """By the number of the step, from 1; the reader removes it."""
        self.error: BaseException | None = None
        """The exception of that failure, if it could be sent."""
        self._num_results = 0
        self._failure: str | None = None
        self._has_ended = False  # a rank has, or is about to
        self._news = threading.Event()
        self._ranks = [_Rank(handle) for handle in handles]
        self._reader = threading.Thread(target=self._read, name="nv_engine reader", daemon=True)
        self._reader.start()

    @property
    def process_ids(self) -> list[int]:
        """Of the processes, in order of rank."""
        return [rank.handle.process_id for rank in self._ranks]

    @property
    def places(self) -> list[str]:
        """Of the ranks, in order."""
        return [rank.handle.place for rank in self._ranks]

    def send(self, message: bytes) -> None:
        """Send every rank a message; waits only for a rank that reads nothing.

        Raises:
            OSError: a rank is gone.
        """
        for rank in self._ranks:
            with rank.is_sending:
                rank.handle.connection.send_bytes(message)

    def reached(self, stage: str, timeout: float = POLL_SECONDS) -> bool:
        """True once every rank has reported `stage` or a later one; waits a moment for it.

        Raises:
            RuntimeError: a rank failed or died; the message names it.
            Exception: of a rank, if it is not a RuntimeError: a wrong checkpoint or option.
        """
        if self._late(stage):
            self.listen(timeout)
            self._check()
        return not self._late(stage)

    def late(self, stage: str) -> str:
        """Names of the ranks that have not reported `stage`."""
        return " and ".join(map(self._name, self._late(stage)))

    def _late(self, stage: str) -> list[_Rank]:
        wanted = STAGES.index(stage)
        return [rank for rank in self._ranks if STAGES.index(rank.stage) < wanted]

    def _check(self) -> None:
        """Raise what ended a rank, if one did."""
        if (text := self.failure()) is None:
            return
        cause = RuntimeError(text)
        if isinstance(self.error, Exception) and not isinstance(self.error, RuntimeError):
            raise self.error from cause
        raise cause

    def failure(self) -> str | None:
        """The failure that ended a rank, or None; after one, waits a moment for the other ranks."""
        if self._failure is None and self._has_ended:
            deadline = time.monotonic() + SETTLE_SECONDS
            while time.monotonic() < deadline and not all(r.is_dead for r in self._ranks):
                self.listen(max(deadline - time.monotonic(), 0))
            self._failure = self._cause()
        return self._failure

    def listen(self, timeout: float) -> None:
        """Return when a report has come since the last call, or after `timeout` seconds."""
        self._news.wait(timeout)
        self._news.clear()

    def silent(self, seconds: float) -> list[str]:
        """Ask every rank for a sign of life; names of those without an answer for `seconds`."""
        now = time.monotonic()
        for rank in self._ranks:
            rank.asked_at = rank.asked_at or now
            if not rank.is_asked and rank.is_sending.acquire(blocking=False):
                try:
                    self._ask(rank)
                finally:
                    rank.is_sending.release()
        owing = [rank for rank in self._ranks if now - (rank.asked_at or now) > seconds]
        return [self._name(rank) for rank in owing]

    @property
    def progress(self) -> str:
        """How many steps each rank had run when it last gave a sign of life."""
        return ", ".join(f"{self._name(rank)}: {rank.num_steps}" for rank in self._ranks)

    def _ask(self, rank: _Rank) -> None:
        """Send a question, unless that would wait: then the rank reads nothing."""
        writable = select.poll()
        writable.register(rank.handle.connection.fileno(), select.POLLOUT)
        if any(event & select.POLLOUT for _, event in writable.poll(0)):
            rank.is_asked = True
            with suppress(OSError):  # it is gone, which `failure` reports
                rank.handle.connection.send_bytes(PING)

    def _read(self) -> None:
        """The thread: take all messages of the ranks, until the last has closed its connection."""
        poller = select.poll()
        ranks = {rank.handle.connection.fileno(): rank for rank in self._ranks}
        for number in ranks:
            poller.register(number, select.POLLIN)
        while ranks:
            for number, _ in poller.poll():
                self._take(ranks[number])
                if ranks[number].is_dead:
                    poller.unregister(number)
                    del ranks[number]
            self._news.set()

    def _take(self, rank: _Rank) -> None:
        try:
            report: Report = rank.handle.connection.recv()
        except (EOFError, OSError):
            rank.is_dead = self._has_ended = True
            return
        if report.stage == "alive":
            rank.num_steps, rank.asked_at, rank.is_asked = report.num_steps, None, False
        elif report.result is not None:
            self._num_results += 1
            self.results[self._num_results] = report.result
        elif report.record is not None:
            receive(report.record)
        elif report.stage == "failed":
            rank.failed, self._has_ended = report, True
        else:
            if rank.handle.number == 0:
                self.facts = report.facts
            rank.stage = report.stage

    def _cause(self) -> str:
        """The first failure: a rank that died without a report, else the earliest traceback."""
        ended = [rank for rank in self._ranks if rank.is_dead or rank.failed]
        first = min(ended, key=lambda rank: rank.failed.time if rank.failed else 0)
        if first.failed:
            self.error = first.failed.error
            return f"{self._name(first)} failed:\n{first.failed.text}"
        return f"{self._name(first)} died: {first.handle.ending()}"

    def _name(self, rank: _Rank) -> str:
        return f"rank {rank.handle.number} of {self.size} ({rank.handle.place})"

    def kill(self) -> None:
        """End every rank now; a `send` that waits in a thread raises OSError."""
        for rank in self._ranks:
            rank.handle.kill()

    def stop(self, grace: float) -> None:
        """End every rank: no more messages, then `grace` seconds, then by force.

        No thread may be in `send`: the file numbers are free for others afterwards.
        """
        deadline = time.monotonic() + grace
        try:
            for rank in self._ranks:
                _shut(rank.handle.connection, socket.SHUT_WR)
            for rank in self._ranks:
                rank.handle.wait(deadline - time.monotonic())
        finally:
            self.kill()
            for rank in self._ranks:
                rank.handle.reap()
                _shut(rank.handle.connection, socket.SHUT_RDWR)
            self._reader.join()  # every connection has ended
            for rank in self._ranks:
                rank.handle.connection.close()


def _shut(connection: Connection, how: int) -> None:
    """End one direction of a connection, or both; nothing happens to one that has ended."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as link:
        link.shutdown(how)
