"""Time from the LLM(...) call to the first embedding, beside the first token of the same shape.

Imports come first. Then each start is a process of its own, made by a fork: one of each kind with
an empty cache of compiled kernels, then some of each that find theirs, in turn.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nv_api import LLM, SamplingParams
from report import report
from workload import QWEN3, TINY, model_folder

KINDS = ("first token", "first embedding")
WARM_STARTS = 2
SMALL: dict[str, Any] = TINY | {"vocab_size": 512, "eos_token_id": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=QWEN3, default="qwen3-0.6b")
    parser.add_argument("--small", action="store_true", help="a tiny shape on a CPU")
    parser.add_argument("--save")
    args = parser.parse_args()
    name, changes = ("qwen3-0.6b", SMALL) if args.small else (args.model, {})
    folder = str(model_folder(name, **changes))
    figures = measure(folder)
    model = "small" if args.small else args.model
    report("startup_pooling", {"model": model, **figures}, args.save)


def measure(folder: str) -> dict[str, dict[str, float]]:
    """The seconds of each kind: with an empty cache, and the median with a warm one."""
    with tempfile.TemporaryDirectory() as caches:
        empty, *warm = (
            {kind: seconds_of_start(folder, kind, str(Path(caches, kind))) for kind in KINDS}
            for _ in range(1 + WARM_STARTS)
        )
    medians = {kind: statistics.median(each[kind] for each in warm) for kind in KINDS}
    found = {"empty caches": empty, "warm caches": medians}
    return {name: {k: round(v, 2) for k, v in each.items()} for name, each in found.items()}


def seconds_of_start(folder: str, kind: str, cache: str) -> float:
    """Start an engine in a forked process, which has this cache."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=start, args=(folder, kind, cache, theirs))
    with warnings.catch_warnings():  # Python 3.12 warns about a fork with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    theirs.close()
    seconds: float = ours.recv()  # EOFError: the start failed, and has printed why
    child.join()
    return seconds


def start(folder: str, kind: str, cache: str, result: Connection) -> None:
    """Send the seconds from the call to the first result."""
    os.environ["TRITON_CACHE_DIR"] = cache
    options: dict[str, Any] = {"runner": "pooling"} if kind == "first embedding" else {}
    begun = time.perf_counter()
    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, **options)
    if kind == "first embedding":
        llm.embed([[1, 2, 3]], use_tqdm=False)
    else:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
    result.send(time.perf_counter() - begun)
    llm.close()


if __name__ == "__main__":
    main()
