"""The first list after a start beside the third of its kind, with empty and with warm caches.

Each case is a start and three lists in a process of its own: the reference list, or a list of many
shapes (`chat_workload`). The three have the same lengths and other ids. The cache of the kernels is
a new folder for each kind of list; the first process finds it empty, the second one warm.
"""

import argparse
import logging
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import triton
from engines import nv
from report import report
from workload import (
    QWEN3,
    TINY,
    Workload,
    chat_workload,
    model_folder,
    reference_workload,
    with_other_ids,
)


class Counted:
    """Captures of graphs, and compilations that this process waited for, since the last reading."""

    def __init__(self) -> None:
        self.captures: list[float] = []
        self.compiles: list[float] = []
        triton.knobs.compilation.listener = self._note_compile
        logger, handler = logging.getLogger("nv"), logging.Handler()
        handler.emit = self._note_capture  # type: ignore[method-assign]
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)

    def _note_capture(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("captured"):
            assert isinstance(record.args, tuple)
            self.captures.append(float(str(record.args[0])))

    def _note_compile(self, *, times: Any, cache_hit: bool, **rest: object) -> None:
        if not cache_hit:
            self.compiles.append(times.total / 1e6)

    def read(self) -> dict[str, Any]:
        figures = {
            "captures": len(self.captures),
            "capture_seconds": round(sum(self.captures), 3),
            "compiles": len(self.compiles),
            "compile_seconds": round(sum(self.compiles), 3),
        }
        self.captures, self.compiles = [], []
        return figures


def lists_of(kind: str, count: int, *, is_tiny: bool) -> list[Workload]:
    make = reference_workload if kind == "reference" else chat_workload
    work = make(4 if is_tiny else 256 if kind == "reference" else 1000)
    if is_tiny:
        work = Workload(work.prompts, [min(n, 16) for n in work.output_lens])
    return [with_other_ids(work, shift) for shift in range(count)]


def run_case(
    connection: Connection, folder: str, kind: str, cache: str, count: int, is_tiny: bool
) -> None:
    """In a process of its own: send the figures of a start and its lists."""
    os.environ["TRITON_CACHE_DIR"] = cache
    lists, counted = lists_of(kind, count, is_tiny=is_tiny), Counted()
    options = {"device": "cpu"} if is_tiny else {}
    begun = time.perf_counter()
    run = nv(folder, max_model_len=4096, **options)
    start = time.perf_counter() - begun
    rows: list[dict[str, Any]] = [{"seconds": round(start, 3)} | counted.read()]
    for work in lists:
        seconds = run(work)
        rows.append({"seconds": round(seconds, 3)} | counted.read())
    started, first, last = (rows[place]["seconds"] for place in (0, 1, -1))
    figures = {
        "start": rows[0],
        "lists": rows[1:],
        "first_over_last": round(first / last, 3),
        "start_plus_first_seconds": round(started + first, 3),
    }
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        figures["peak_allocated_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        figures["used_gib"] = round((total - free) / 2**30, 3)
    connection.send(figures)


def measure(*arguments: Any) -> dict[str, Any]:
    """Run a case in a fork of this process, which has imported all and used no device."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=run_case, args=(sender, *arguments))
    child.start()
    sender.close()
    figures: dict[str, Any] = receiver.recv()
    child.join()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=QWEN3, default="qwen3-0.6b")
    parser.add_argument("--kinds", nargs="+", default=["reference", "chat"])
    parser.add_argument("--lists", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a dry run on a CPU")
    parser.add_argument("--save", help="write the JSON to this file too")
    args = parser.parse_args()
    folder = str(model_folder(args.model, **(TINY if args.tiny else {})))
    rows = []
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as cache:
            for caches in ("empty", "warm"):
                figures = measure(folder, kind, cache, args.lists, args.tiny)
                rows.append({"list": kind, "caches": caches} | figures)
                print(rows[-1], flush=True)
    report("first_list", {"model": args.model, "rows": rows}, args.save)


if __name__ == "__main__":
    main()
