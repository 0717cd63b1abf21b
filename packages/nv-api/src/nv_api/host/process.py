"""The host's process: its start, as the front end sees it, and its own main.

Owns the socket pair. Never reads a request.
"""

import gc
import os
import socket
from typing import TYPE_CHECKING

from nv_engine.spawned import SpawnedProcess

from nv_api.collector import uncollected
from nv_api.host.frames import REFUSALS, Failed, Log, Ready, Start
from nv_api.host.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from nv_engine import Engine, EngineConfig
    from transformers import PreTrainedTokenizerBase

SEND_SECONDS = 5.0
EXPLAINED = (*REFUSALS, RuntimeError, OSError, MemoryError)
"""Errors whose message is enough. Another is a fault of the program: its trace is logged too."""


class HostProcess(SpawnedProcess):
    """A host that imports what it needs, and waits for its Start."""

    entry = "nv_api.host.process:main"

    def __init__(self) -> None:
        self.end, theirs = socket.socketpair()
        try:
            super().__init__(self.entry, theirs.fileno())
        finally:
            theirs.close()


def main(end: int) -> None:
    """Run a host in a process of its own; `end` is the file number of its socket."""
    wire = Wire(socket.socket(fileno=end))
    from nv_engine import Engine  # noqa: PLC0415  # imports torch: seconds
    from nv_engine.log import forward  # noqa: PLC0415

    forward(lambda record: wire.send(Log(record.levelno, record.getMessage())))
    is_made = serve(wire, Engine)
    os._exit(0 if is_made else 1)  # at once: taking torch down takes a second


def serve(wire: Wire, make_engine: "Callable[[EngineConfig], Engine]") -> bool:
    """Make an engine of the first frame and run it until the end; False if it cannot be made."""
    from nv_engine.log import LOGGER  # noqa: PLC0415  # after the process has begun

    from nv_api.host.host import Host  # noqa: PLC0415
    from nv_api.structured import grammar_compiler  # noqa: PLC0415

    start = _first(wire)
    if start is None:
        wire.close()
        return True
    try:
        with uncollected():
            engine = make_engine(start.config)
    except Exception as error:  # whatever it is, the front end raises it
        if not isinstance(error, EXPLAINED):
            LOGGER.error("the engine cannot be made", exc_info=True)
        wire.send(Failed(type(error).__name__, str(error)))
        wire.drain(SEND_SECONDS)
        wire.close()
        return False
    wire.send(Ready(engine.facts))
    gc.freeze()  # the collector need not walk over what was loaded
    Host(engine, wire, grammar_compiler(lambda: _tokenizer(start), engine)).run()
    return True


def _tokenizer(start: Start) -> "PreTrainedTokenizerBase | None":
    """The tokenizer, which only grammars need here."""
    if start.tokenizer is None:
        return None
    with uncollected():  # it is loaded beside the steps, which a full collection would hold up
        from nv_api.tokenizer import load_tokenizer  # noqa: PLC0415  # imports transformers

        tokenizer = load_tokenizer(start.tokenizer, mode=start.tokenizer_mode)
        gc.freeze()
    return tokenizer


def _first(wire: Wire) -> Start | None:
    """The Start; None if the front end is gone, or stops the host, before it sends one."""
    while wire.is_open:
        for frame in wire.receive(1.0):
            return frame if isinstance(frame, Start) else None
    return None
