"""Requests: the lines of a batch's input file, in OpenAI's form.

Owns what is wrong with a line. Reads the file once to check it, and a line again when it is due, so
that a large file is never in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from nv_engine.values import shown

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"),
    *("/classify", "/pooling"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line.

    Attributes:
        number: of the line in its file, from 1.
        custom_id: the client's name for the request; None: it has none that can be read.
        problem: what is wrong; None: the request can be sent.
        url: the path of the route.
        body: of the request.
    """

    number: int
    custom_id: str | None = None
    problem: str | None = None
    url: str = ""
    body: Any = None


class Place(NamedTuple):
    """Where a line is in its file."""

    number: int
    start: int
    custom_id: str | None


class Requests:
    """An input file.

    Args:
        path: of the file.

    Raises:
        OSError: it cannot be read.
        ValueError: two lines have one custom_id.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self.places: list[Place] = []
        """Of all lines that are not blank."""
        try:
            self._check(path)
        except BaseException:
            self._file.close()
            raise

    def read(self, place: Place) -> Line:
        """One line."""
        self._file.seek(place.start)
        return _line(self._file.readline(), place.number)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _check(self, path: Path) -> None:
        """Find all lines, and names that two of them have."""
        numbers: dict[str, int] = {}
        for number, start, content in self._all():
            name = _line(content, number).custom_id
            if name in numbers:
                raise ValueError(
                    f"{path} has the custom_id {shown(name)} on the lines {numbers[name]} and "
                    f"{number}: each line needs one of its own"
                )
            if name is not None:
                numbers[name] = number
            self.places.append(Place(number, start, name))

    def _all(self) -> Iterator[tuple[int, int, bytes]]:
        """Number, first byte and content of each line that is not blank."""
        start = 0
        for number, content in enumerate(self._file, 1):
            if content.strip():
                yield number, start, content
            start += len(content)


def _line(content: bytes, number: int) -> Line:
    """A line, with the first thing that is wrong with it."""
    place = f"line {number}"
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        return Line(number=number, problem=f"{place} is not JSON: {error}")
    if not isinstance(found, dict):
        return Line(number=number, problem=f"{place} is {shown(found)}: it must be a JSON object")
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        problem = f"{place}: custom_id is {shown(custom_id)}: it must be a text that is not empty"
        return Line(number=number, problem=problem)
    if (wrong := _problem(found)) is not None:
        return Line(number=number, custom_id=custom_id, problem=f"{place}: {wrong}")
    return Line(number=number, custom_id=custom_id, url=found["url"], body=found["body"])


def _problem(found: dict[str, Any]) -> str | None:
    """The fault of a line that has a name; None: it has none."""
    url, body = found.get("url"), found.get("body")
    if found.get("method") != "POST":
        return f"method is {shown(found.get('method'))}: it must be POST"
    if url not in URLS:
        return f"url is {shown(url)}: it must be one of {', '.join(URLS)}"
    if not isinstance(body, dict):
        return f"body is {shown(body)}: it must be an object"
    if body.get("stream"):
        return "body.stream is true: a batch has no streams, so leave it out"
    return None
