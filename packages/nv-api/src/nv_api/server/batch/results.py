"""Results: the output file of a batch, a line for each request.

Owns the file: it has whole lines only, of one run at a time. A line that was cut short when an
earlier run ended is removed.
"""

import fcntl
import os
import uuid
from pathlib import Path
from typing import Any

import orjson

from nv_api.server.batch.call import Reply
from nv_api.server.batch.requests import Line, Place

PREFIX = "batch_req_"
_BEGINNING = orjson.dumps({"id": PREFIX})[:-2]
"""The bytes that every line begins with."""
INVALID_LINE = "invalid_line"


class Results:
    """An output file, which may have the results of earlier runs.

    Args:
        path: of the file; it is made if there is none.

    Raises:
        OSError: it cannot be read or written.
        ValueError: it has something else than results, or another run writes to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115  # `close` does it
        self._done_ids: set[str] = set()
        self._done_lines: set[int] = set()
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def has(self, place: Place) -> bool:
        """Whether an earlier run has the result of a line."""
        if place.custom_id is None:
            return place.number in self._done_lines
        return place.custom_id in self._done_ids

    def add(self, line: Line, reply: Reply | None) -> None:
        """Write the result of a line; without a reply, it is the line's problem."""
        error = None
        response = None
        if reply is None:
            error = {"code": INVALID_LINE, "message": line.problem, "line": line.number}
        else:
            response = {
                "status_code": reply.status,
                "request_id": reply.request_id,
                "body": orjson.Fragment(reply.body),
            }
        result = {
            "id": f"{PREFIX}{uuid.uuid4().hex}",
            "custom_id": line.custom_id,
            "response": response,
            "error": error,
        }
        left = memoryview(orjson.dumps(result) + b"\n")
        while left:  # a disk that is nearly full may take a part
            left = left[self._file.write(left) :]

    def close(self) -> None:
        """Write everything to the disk and close the file."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another run writes to {self._path}: wait for it, or give another file"
            ) from None

    def _read(self) -> None:
        """Note what is done, and repair the end."""
        self._file.seek(0)
        start = 0
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            for number, content in enumerate(lines, 1):
                result = _result(content)
                if result is None and not content.endswith(b"\n") and _is_cut(content):
                    self._file.truncate(start)
                    break
                if result is None:
                    raise ValueError(
                        f"line {number} of {self._path} is not a result of a batch: give another "
                        "file, or a new one"
                    )
                self._note(result)
                start += len(content)
                if not content.endswith(b"\n"):
                    self._file.write(b"\n")

    def _note(self, result: dict[str, Any]) -> None:
        custom_id, error = result["custom_id"], result.get("error")
        if isinstance(custom_id, str):
            self._done_ids.add(custom_id)
        elif isinstance(error, dict) and isinstance(error.get("line"), int):
            self._done_lines.add(error["line"])


def _result(content: bytes) -> dict[str, Any] | None:
    """A result; None if the line is not one."""
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) and found.keys() >= {"id", "custom_id"} else None


def _is_cut(content: bytes) -> bool:
    """Whether a last line is the beginning of a result."""
    return content.startswith(_BEGINNING) or _BEGINNING.startswith(content)
