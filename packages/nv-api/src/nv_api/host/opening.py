"""Opening: adapters whose files threads open, and what waits for them.

Owns the threads. The files may have to come from a network: meanwhile the engine steps. Never adds
an adapter (the host does).
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from nv_engine import LoRARequest
    from nv_models.adapters import AdapterFiles

NUM_THREADS = 2
"""Adapters opened at once: a slow download does not hold up one that is here."""

Waiting: TypeAlias = "Mapping[int, Callable[[], None]]"
"""By the id of each request or call: how it goes on."""


class Opening:
    """Adapters that are being opened; requests for the same one wait together.

    Args:
        open_adapter: of the engine; any thread may call it.
        ring: called in a thread when it has opened one.
    """

    def __init__(
        self, open_adapter: "Callable[[LoRARequest], AdapterFiles]", ring: Callable[[], None]
    ) -> None:
        self._open, self._ring = open_adapter, ring
        self._threads = ThreadPoolExecutor(NUM_THREADS, "nv adapter")
        self._waiting: dict[LoRARequest, dict[int, Callable[[], None]]] = {}
        self._ended: SimpleQueue[tuple[LoRARequest, Future[AdapterFiles]]] = SimpleQueue()

    def begin(self, request_id: int, lora: "LoRARequest", go_on: Callable[[], None]) -> None:
        """Open an adapter, if no thread does already."""
        if lora in self._waiting:
            self._waiting[lora][request_id] = go_on
            return
        self._waiting[lora] = {request_id: go_on}
        opened = self._threads.submit(self._open, lora)
        opened.add_done_callback(lambda done: self._note(lora, done))

    def _note(self, lora: "LoRARequest", opened: "Future[AdapterFiles]") -> None:
        """In a thread: hand an adapter to the host's own."""
        self._ended.put((lora, opened))
        self._ring()

    def forget(self, request_id: int) -> None:
        """Drop a request that is aborted from all that wait."""
        for waiting in self._waiting.values():
            waiting.pop(request_id, None)

    def ended(self) -> "Iterator[tuple[LoRARequest, Future[AdapterFiles], Waiting]]":
        """Take off the adapters that are open, or cannot be."""
        while True:
            try:
                lora, opened = self._ended.get_nowait()
            except Empty:
                return
            if not opened.cancelled():
                yield lora, opened, self._waiting.pop(lora)

    def close(self) -> None:
        """Open no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
