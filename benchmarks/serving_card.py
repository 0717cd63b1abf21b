"""Servers on a card, one after the other, under the same requests: nv's, another, and none.

Each `--server NAME=COMMAND` is started with dummy weights and a tokenizer of made-up words, warmed
up, measured with several processes of `nv bench serve`'s client, and stopped; `{model}` and
`{port}` in the command are filled in. First the client itself is measured, on a server without a
model: its times per token should be the steps of that server. With `--offline`,
`LLM` runs alone at the end, for what serving adds to a step and to a first token.

Requests have token ids and full-length answers. Goodput counts the requests per second with a first
token within 200 ms and 20 ms per token. CPU time is that of the server's first process (`front`)
and of all its children (`engine`), per token of the answers. `--out` gets the figures after every
part, and each server's log.
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from generators import Generators
from null_server import NullServer
from nv_api.bench.figures import figures
from nv_api.bench.load import INFINITY, Load
from nv_api.bench.pace import Run
from report import report
from serving_cost import cpu_time, free_port
from workload import TINY, VOCAB, model_folder, uniform_workload

NV = f"{sys.executable} -m nv_api serve {{model}} --load-format dummy --port {{port}}"
BOUNDS = {"ttft": 200.0, "tpot": 20.0}
PERCENTILES = (50.0, 99.0)
START_SECONDS = 240.0
STOP_SECONDS = 10.0
TAIL = 2000
"""Characters of a server's log that are printed if it stops early."""
NULL_STEP_SECONDS = 0.004
STEPS = 128
"""Of 256 tokens, the later ones: all prompts have been read."""
SMALL: dict[str, Any] = TINY | {"vocab_size": 1024}
"""Of the config, for a try on a CPU."""


def main() -> None:
    args = arguments()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    folder = make_model(small=args.small)
    results = Results(out / "serving_card.json", args.seconds)
    generators = Generators(args.generators, str(folder))
    try:
        measure_client(generators, results, args)
        for name, _, command in (each.partition("=") for each in args.server):
            measure_server(name, command, folder, generators, results, args)
    finally:
        generators.close()
    if args.offline and results.has_time:
        results.add("alone", "LLM", alone(str(folder), small=args.small))
    report("serving_card", {"rows": results.rows}, str(results.path))  # last: it opens the card
    print(results.table(), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", action="append", help="NAME=COMMAND; several")
    parser.add_argument("--generators", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=INFINITY, help="no part begins after")
    parser.add_argument("--offline", action="store_true", help="LLM alone, too")
    parser.add_argument("--small", action="store_true", help="a toy model and load, for a CPU")
    parser.add_argument("--out", default="serving_card", help="folder")
    args = parser.parse_args()
    args.server = args.server or [f"nv={NV}"]
    return args


def loads(*, small: bool) -> dict[str, Load]:
    """The parts, in their order."""

    def load(size: int, num_input: int, num_output: int, **more: Any) -> Load:
        if small:
            size, num_input, num_output = max(8, size // 64), num_input // 16, num_output // 16
        seed = next(seeds)
        return Load(
            num_prompts=size,
            random_input_len=num_input,
            random_output_len=num_output,
            ignore_eos=True,
            seed=seed,
            request_timeout=120.0,
            **more,
        )

    seeds = iter(range(1, 100))
    prefix = 128 if small else 2048
    return {
        "warm-up": load(512, 512, 128),
        "1/s": load(15, 512, 128, request_rate=1.0),
        "4/s": load(60, 512, 128, request_rate=4.0),
        "16/s": load(192, 512, 128, request_rate=16.0),
        "64/s": load(640, 512, 128, request_rate=64.0),
        "128/s": load(768, 512, 128, request_rate=128.0),
        "192/s": load(1152, 512, 128, request_rate=192.0),
        "at once": load(1000, 512, 128),
        "256 streams": load(768, 1024, 256, max_concurrency=256),
        "prefixes": load(768, 128, 128, random_prefix_len=prefix, random_num_prefixes=32),
        "wave": load(256, 1024, 256),
    }


class Results:
    """The figures so far, in a file and as a table."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path = path
        self._began = time.monotonic()
        self._seconds = seconds
        self.rows: list[dict[str, Any]] = []

    @property
    def has_time(self) -> bool:
        return time.monotonic() - self._began < self._seconds

    def add(self, part: str, server: str, found: dict[str, Any]) -> None:
        """Keep a part's figures; the file is whole after each."""
        now = round(time.monotonic() - self._began, 1)
        self.rows.append({"part": part, "server": server, "at_s": now, **found})
        self.path.write_text(json.dumps(self.rows, indent=1) + "\n")
        print(f"{now:6.1f} s  {server:6} {part}", flush=True)

    def table(self) -> str:
        """A line per part and server."""
        title = f"{'part':12}{'server':7}{'req/s':>7}{'good':>7}{'TTFT p50':>9}{'p99':>8}"
        title += f"{'TPOT p50':>9}{'p99':>7}{'front us':>9}{'eng us':>7}"
        title += f"{'step':>6}{'client':>7}{'fail':>5}"
        return "\n".join([title, *(line(row) for row in self.rows)])


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    start = f"{row['part']:12}{row['server']:7}"
    if "request_throughput" not in row:
        named = {k: v for k, v in row.items() if k not in ("part", "server", "at_s")}
        return start + ", ".join(f"{name} {value}" for name, value in named.items())
    return start + (
        f"{row['request_throughput']:7.1f}{row['request_goodput']:7.1f}"
        f"{row['p50_ttft_ms']:9.1f}{row['p99_ttft_ms']:8.1f}"
        f"{row['p50_tpot_ms']:9.2f}{row['p99_tpot_ms']:7.2f}"
        f"{row.get('front_us', 0.0):9.1f}{row.get('engine_us', 0.0):7.1f}"
        f"{row.get('step_ms', 0.0):6.2f}{row['client_cpu_share']:7.2f}{row['failed']:5}"
    )


def measure_client(generators: Generators, results: Results, args: argparse.Namespace) -> None:
    """256 streams of a server that has no model, at one and two steps of a card."""
    for step in NULL_STEP_SECONDS, NULL_STEP_SECONDS / 2:
        server = NullServer(args.generators, step)
        try:
            wait_for(server.port, START_SECONDS)
            run = generators.run(f"http://127.0.0.1:{server.port}", loads(small=args.small)["wave"])
        finally:
            server.close()
        results.add(f"{step * 1e3:g} ms", "null", of_run(run))


def measure_server(
    name: str,
    command: str,
    folder: Path,
    generators: Generators,
    results: Results,
    args: argparse.Namespace,
) -> None:
    """All parts on one server; what stops it is kept as a result, and others go on."""
    port, log = free_port(), Path(args.out) / f"{name}.log"
    words = shlex.split(command.format(model=folder, port=port))
    began = time.monotonic()
    try:
        with started(words, log) as server:
            wait_for(port, START_SECONDS, server)
            results.add("start", name, {"seconds": round(time.monotonic() - began, 1)})
            for part, load in loads(small=args.small).items():
                if not results.has_time:
                    raise TimeoutError(f"--seconds is over before the part {part}")
                before = Times.of(server.pid)
                run = generators.run(f"http://127.0.0.1:{port}", load)
                used = Times.of(server.pid).since(before)
                results.add(part, name, of_run(run) | used.per_token(run) | later_steps(run))
    except (OSError, RuntimeError) as error:
        results.add("stopped", name, {"error": str(error)})
        print(log.read_text(errors="replace")[-TAIL:], flush=True)


@contextmanager
def started(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server in a process group of its own, until the block ends."""
    with log.open("wb") as file:
        server = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield server
        finally:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(STOP_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # whatever it left
            server.wait()


def wait_for(port: int, seconds: float, server: subprocess.Popen[bytes] | None = None) -> None:
    """Until /health has status 200.

    Raises:
        TimeoutError: it has not, for so long.
        RuntimeError: the server has ended.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server is not None and server.poll() is not None:
            raise RuntimeError(f"the server ended with code {server.returncode}: see its log")
        with (
            suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise TimeoutError(f"the server was not ready within {seconds:g} s")


class Times(NamedTuple):
    """CPU seconds of a server so far."""

    front: float
    engine: float

    @classmethod
    def of(cls, process_id: int) -> "Times":
        children = descendants(process_id)
        return cls(cpu_time(process_id).whole, sum(cpu_time(each).whole for each in children))

    def since(self, earlier: "Times") -> "Times":
        return Times(self.front - earlier.front, self.engine - earlier.engine)

    def per_token(self, run: Run) -> dict[str, float]:
        num = max(1, sum(each.num_output for each in run.whole))
        return {"front_us": self.front / num * 1e6, "engine_us": self.engine / num * 1e6}


def descendants(process_id: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    parent_of = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent_of[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
    found, wave = [], [process_id]
    while wave:
        wave = [child for child, parent in parent_of.items() if parent in wave]
        found += wave
    return found


def of_run(run: Run) -> dict[str, Any]:
    """A part's figures, with the first error if there is one."""
    found: dict[str, Any] = dict(figures(run, PERCENTILES, BOUNDS))
    errors = [each.error for each in run.outcomes if each.error]
    return found | ({"error": errors[0]} if errors else {})


def later_steps(run: Run) -> dict[str, float]:
    """Milliseconds per token of a stream's last STEPS: the median of streams whose tokens came one
    by one, and the share of those."""
    single = [each for each in run.whole if len(each.itls) == each.num_output - 1 >= STEPS]
    if not single:
        return {}
    times = [sum(each.itls[-STEPS:]) / STEPS * 1e3 for each in single]
    return {"step_ms": statistics.median(times), "single_share": len(single) / len(run.whole)}


def alone(model: str, *, small: bool) -> dict[str, float]:
    """`LLM` in a process of its own."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_alone, args=(theirs, model, small))
    process.start()
    theirs.close()
    try:
        return dict(ours.recv())
    except EOFError:
        return {}
    finally:
        process.join()


def _alone(end: Any, model: str, small: bool) -> None:
    """Milliseconds of a first token, and of a step of 256 rows: 256 tokens less the time of 128."""
    from nv_api import LLM, SamplingParams

    llm = LLM(model, load_format="dummy")
    divisor = 16 if small else 1

    def seconds(batch: int, num_input: int, num_output: int, seed: int) -> float:
        work = uniform_workload(batch, num_input // divisor, num_output, seed)
        prompts: list[Any] = [[token % 1000 for token in ids] for ids in work.prompts]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_output)
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    batch, tokens = (8, 16) if small else (256, 2 * STEPS)
    seconds(batch, 1024, tokens, 1)
    steps = []
    for seed in range(2, 5):
        half = seconds(batch, 1024, tokens // 2, 2 * seed)
        steps.append((seconds(batch, 1024, tokens, 2 * seed + 1) - half) / (tokens // 2) * 1e3)
    firsts = [seconds(1, 512, 1, seed) * 1e3 for seed in range(20, 40)]
    end.send({"step_ms": statistics.median(steps), "first_token_ms": statistics.median(firsts)})


def make_model(*, small: bool) -> Path:
    """A folder with a config and a tokenizer, whose last id is EOS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = SMALL["vocab_size"] if small else VOCAB
    folder = model_folder("qwen3-0.6b", eos_token_id=size - 1, **(SMALL if small else {}))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words, merges = made_words(size - 1 - len(letters))
    vocabulary = [*letters, *words, "<|im_end|>"]
    made = Tokenizer(models.BPE({token: place for place, token in enumerate(vocabulary)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    fast.save_pretrained(folder)
    return folder


def made_words(num: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Words that begin with a space, and the merges that make each of a shorter word."""
    space = "Ġ"
    words: list[str] = []
    merges: list[tuple[str, str]] = []
    for place in range(num):
        parent = words[place // 26 - 1] if place >= 26 else space
        letter = chr(97 + place % 26)
        words.append(parent + letter)
        merges.append((parent, letter))
    return words, merges


if __name__ == "__main__":
    main()
