"""Run: a batch, from its two files to the end.

Owns the order: the files are checked, then the model is loaded, then the lines are answered. What
is done stays done, however a run ends.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from nv_engine import values
from nv_engine.values import shown
from starlette.types import ASGIApp
from tqdm.auto import tqdm  # type: ignore[import-untyped]

import nv_api
from nv_api.server.app import make_app
from nv_api.server.batch.call import call
from nv_api.server.batch.requests import Place, Requests
from nv_api.server.batch.results import Results
from nv_api.server.lora_modules import with_room
from nv_api.server.options import ServeOptions

UNAVAILABLE = 503
INTERRUPTED = 130
"""The exit code after Ctrl-C; the shell's."""


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """The files of a batch, and how many lines are in flight at once.

    Raises:
        ValueError: at construction, for a value out of range.
        FileNotFoundError: at construction, for a file that is not there or cannot be.
    """

    input_file: Path
    output_file: Path
    concurrency: int = 256
    """Lines in flight at once."""

    def __post_init__(self) -> None:
        values.integer("concurrency", self.concurrency, 1)
        if not self.input_file.is_file():
            raise FileNotFoundError(
                f"input_file is {shown(str(self.input_file))}, which is not a file: give one with "
                "a request per line"
            )
        if self.output_file.is_dir() or not self.output_file.parent.is_dir():
            raise FileNotFoundError(
                f"output_file is {shown(str(self.output_file))}, which cannot be a file there: "
                "give a name in a folder that exists"
            )
        if self.output_file.exists() and self.output_file.samefile(self.input_file):
            raise ValueError(
                f"input and output are both {self.input_file}: give the output another name"
            )


@dataclass
class Counts:
    """Lines, by what became of them."""

    answered: int = 0
    refused: int = 0
    """Their response has another status than 200."""
    wrong: int = 0
    skipped: int = 0
    """An earlier run has their result."""
    left: int = 0

    def __str__(self) -> str:
        return (
            f"{self.answered} answered, {self.refused} refused, {self.wrong} wrong, "
            f"{self.skipped} done before, {self.left} left"
        )


def run(
    model: str, llm_options: Mapping[str, Any], options: ServeOptions, batch: BatchJob
) -> tuple[Counts, int]:
    """Answer the lines that have no result yet; returns their counts and the exit code.

    Raises:
        OSError, ValueError: a file cannot be used; nothing was done.
        RuntimeError: the engine is lost; run it again for the lines that are left.
    """
    with (
        closing(Requests(batch.input_file)) as requests,
        closing(Results(batch.output_file)) as results,
    ):
        todo = [place for place in requests.places if not results.has(place)]
        counts = Counts(skipped=len(requests.places) - len(todo), left=len(todo))
        if not todo:
            return counts, 0

        engine = with_room(llm_options, options)

        async def whole() -> None:
            llm = nv_api.AsyncLLM(model, **engine)
            try:
                app = make_app(llm, options)
                await app.state.service.ready()
                work = _Work(app, requests, results, counts)
                await work.do(todo, batch.concurrency)
            finally:
                await llm.close()

        try:
            asyncio.run(whole())
        except KeyboardInterrupt:
            return counts, INTERRUPTED
        return counts, 0


class _Work:
    """Answers lines."""

    def __init__(self, app: ASGIApp, requests: Requests, results: Results, counts: Counts) -> None:
        self._app = app
        self._requests = requests
        self._results = results
        self._counts = counts

    async def do(self, todo: list[Place], concurrency: int) -> None:
        """Answer all lines, some at once."""
        places = iter(todo)
        with tqdm(total=len(todo), unit="line", disable=None) as bar:
            tasks = [
                asyncio.create_task(self._follow(places, bar))
                for _ in range(min(concurrency, len(todo)))
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def _follow(self, places: Iterator[Place], bar: tqdm) -> None:
        """Answer one line after the other."""
        for place in places:
            await self._answer(place)
            bar.update()

    async def _answer(self, place: Place) -> None:
        line = self._requests.read(place)
        counts = self._counts
        if line.problem is not None:
            self._results.add(line, None)
            counts.wrong += 1
        else:
            reply = await call(self._app, line.url, line.body)
            if reply.status == UNAVAILABLE:  # no result: a later run answers it
                reason = orjson.loads(reply.body)["error"]["message"]
                raise RuntimeError(f"line {line.number} has no answer: {reason}")
            self._results.add(line, reply)
            if reply.status == 200:
                counts.answered += 1
            else:
                counts.refused += 1
        counts.left -= 1
