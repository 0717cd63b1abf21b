"""A server over the real AsyncLLM, on a thread with an event loop of its own."""

import asyncio
import threading
import time

import httpx
import pytest

for needed in "fastapi", "uvicorn", "prometheus_client":
    pytest.importorskip(needed)

from nv_api.server import ServeOptions, make_app  # noqa: E402  # after the skip
from nv_api.server.listening import Listening  # noqa: E402
from nv_api.server.run import Server  # noqa: E402


class RunningServer:
    """A server until `close`, which also closes the model.

    Args:
        make_llm: makes the AsyncLLM, on the server's thread.
        loop_factory: makes the event loop; None: asyncio's.
        **options: as of ServeOptions.
    """

    def __init__(self, make_llm, loop_factory=None, **options):
        self._make_llm = make_llm
        self._loop_factory = loop_factory
        self._options = ServeOptions(model="m/tiny", **options)
        self._is_made = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_made.wait(30)
        self.until(lambda: self.llm.is_ready or not self._thread.is_alive(), seconds=120)
        assert self.llm.is_ready, "the model cannot be loaded: the log has the reason"
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def _run(self):
        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            runner.run(self._serve())

    async def _serve(self):
        self.loop = asyncio.get_running_loop()
        self.llm = self._make_llm()
        self.server = Server(make_app(self.llm, self._options), Listening(port=0))
        self._is_made.set()
        try:
            await self.server.serve()
        finally:
            await self.llm.close()

    @property
    def service(self):
        return self.server._service

    @property
    def thread_id(self):
        """The system's number of the thread of the event loop."""
        return self._thread.native_id

    def until(self, condition, seconds=30.0):
        """Wait until a condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.005)

    def is_idle(self):
        """Whether nothing is in flight anywhere, and every block is free."""
        stats = self.llm.stats
        return not (
            self.llm.num_unfinished
            or self.service.lifecycle.guards
            or self.service.admission.num_in_flight
            or stats.num_running
            or stats.num_waiting
            or stats.num_free_blocks != stats.num_blocks
        )

    def close(self):
        self.client.close()
        self.server._is_forced = self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
