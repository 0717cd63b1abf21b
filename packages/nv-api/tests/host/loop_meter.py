"""The cost of the callbacks of an event loop, and its lateness."""

import asyncio
import threading
import time
from contextlib import contextmanager
from pathlib import Path

TICK_SECONDS = 0.005


class LoopMeter:
    """Counts while `with meter.at_work(loop, thread):` runs; times are in milliseconds.

    CPU time is counted, which other processes do not add to; wall time is for reports alone.
    """

    def __init__(self):
        self.callbacks = []
        """CPU time and name of each callback over a millisecond."""
        self.lags = []
        """Lateness of a callback that comes each 5 ms: the wall's, and without the time that the
        process's threads waited for a CPU."""

    @contextmanager
    def at_work(self, monkeypatch, loop, thread_id):
        monkeypatch.setattr(asyncio.events.Handle, "_run", self._counted(thread_id))
        ticking = asyncio.run_coroutine_threadsafe(self._tick(), loop)
        try:
            yield self
        finally:
            ticking.cancel()
            monkeypatch.undo()

    @property
    def dearest(self):
        """The dearest callback: CPU time and name."""
        return max(self.callbacks, default=(0.0, "none"))

    @property
    def latest(self):
        """The largest lateness, of both kinds."""
        walls, ours = zip(*self.lags, strict=True)
        return round(max(walls), 1), round(max(ours), 1)

    def _counted(self, thread_id):
        run = asyncio.events.Handle._run

        def counted(handle):
            if threading.get_native_id() != thread_id:
                return run(handle)
            began = time.thread_time()
            try:
                return run(handle)
            finally:
                cost = (time.thread_time() - began) * 1e3
                if cost > 1:
                    self.callbacks.append((round(cost, 2), repr(handle)[:200]))

        return counted

    async def _tick(self):
        while True:
            began, waited = time.monotonic(), waiting()
            await asyncio.sleep(TICK_SECONDS)
            late = (time.monotonic() - began - TICK_SECONDS) * 1e3
            self.lags.append((late, max(0.0, late - (waiting() - waited) * 1e3)))


def waiting():
    """Seconds that this process's threads have waited for a CPU."""
    total = 0
    for each in Path("/proc/self/task").iterdir():
        try:
            total += int((each / "schedstat").read_text().split()[1])
        except OSError:  # the thread has ended, or the system does not count
            continue
    return total / 1e9
