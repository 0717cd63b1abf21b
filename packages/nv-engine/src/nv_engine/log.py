"""The log: the logger "nv", to which a start writes six lines at level INFO.

Owns the logger and what the environment variable NV_LOG does to it. Without that variable the log
is the caller's: `logging.basicConfig(level="INFO")` shows it as any other.
"""

import logging
import os
from collections.abc import Callable
from logging.handlers import QueueHandler

LOGGER = logging.getLogger("nv")
VARIABLE = "NV_LOG"
LEVELS = ("debug", "info", "warning", "error", "critical")
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def follow_environment() -> None:
    """Log from the level that NV_LOG names, to stderr unless the caller set up logging.

    Raises:
        ValueError: NV_LOG is not a level's name.
    """
    level = os.environ.get(VARIABLE, "")
    if not level:
        return
    if level.lower() not in LEVELS:
        raise ValueError(f"{VARIABLE} is {level!r}: it must be one of {', '.join(LEVELS)}")
    LOGGER.setLevel(level.upper())
    if not LOGGER.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        LOGGER.addHandler(handler)


def forward(send: Callable[[logging.LogRecord], None]) -> None:
    """Let this process, a rank, send its records to the process that started it.

    Args:
        send: takes each record from level INFO on; the record can be pickled.
    """
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    LOGGER.addHandler(_Forward(send))


def receive(record: logging.LogRecord) -> None:
    """Log a record that another process has sent, if this process logs records of its level."""
    if LOGGER.isEnabledFor(record.levelno):
        LOGGER.handle(record)


class _Forward(QueueHandler):
    """A handler whose queue is a function."""

    def __init__(self, send: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(None)  # type: ignore[arg-type]  # `enqueue` alone would use it
        self._send = send

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send a record, which `prepare` has made fit for pickling."""
        self._send(record)
