"""The demo model on a CPU: nv, transformers and llama.cpp, one process each, in turn.

nv and llama.cpp read the demo's own file (Q4_1); nv and transformers its values in bf16 and fp32.
Batch 1 is 64 tokens in and 64 out; batch 16 has mixed lengths, and only requested tokens count (a
batched generate pads to the longest). Greedy, EOS ignored. Each turn is a run of every engine, so
that other programs of the machine slow all of them alike: rates are medians, and a ratio is the
median of the turns' ratios. With `--threads 1` seconds are the processor's time.

Also measured: what the weights of nv hold in a process that has read them all, pages of files too.

`uv run --group bench benchmarks/cpu.py` installs the other engines. `--before FOLDER` runs nv of
another checkout too, on the same weights in floats.
"""

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from report import report
from workload import Workload, uniform_workload

Run = Callable[[Workload], None]
Q4_1 = "q4_1"
SMALL = Path(__file__).parents[1] / "packages/nv-engine/tests/numerics/checkpoint"
WORKERS = ("nv q4_1", "nv bfloat16", "transformers bfloat16", "nv float32",
           "transformers float32", "llama.cpp q4_1")  # fmt: skip
RATIOS = (
    ("nv q4_1", "nv bfloat16"),
    ("nv q4_1", "llama.cpp q4_1"),
    ("nv bfloat16", "transformers bfloat16"),
    ("nv bfloat16", "llama.cpp q4_1"),
    ("nv float32", "transformers float32"),
    ("nv bfloat16", "before bfloat16"),
    ("nv float32", "before float32"),
)


def mixed_workload(batch: int, seed: int) -> Workload:
    """Prompts and outputs of 16 to 128 tokens."""
    rng = random.Random(seed)
    prompts = [[rng.randint(10, 40000) for _ in range(rng.randint(16, 128))] for _ in range(batch)]
    return Workload(prompts, [rng.randint(16, 128) for _ in range(batch)])


WORK = {
    "batch_1": lambda seed: uniform_workload(1, 64, 64, seed),
    "batch_16_mixed": lambda seed: mixed_workload(16, seed),
}


def nv(dtype: str, floats: str, threads: int) -> Run:
    import torch
    from nv_api import LLM, SamplingParams

    torch.set_num_threads(threads)
    model, dtype = ("demo", "bfloat16") if dtype == Q4_1 else (floats, dtype)
    options = {"max_num_seqs": 16, "max_model_len": 1024, "skip_tokenizer_init": True}
    llm = LLM(model, device="cpu", dtype=dtype, **options)

    def run(work: Workload) -> None:
        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=n, detokenize=False)
            for n in work.output_lens
        ]
        outputs = llm.generate(work.prompts, params, use_tqdm=False)
        assert [len(output["token_ids"]) for output in outputs] == work.output_lens

    return run


def transformers(dtype: str, floats: str, threads: int) -> Run:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    net = AutoModelForCausalLM.from_pretrained(floats, dtype=getattr(torch, dtype)).eval()

    def run(work: Workload) -> None:
        longest, num_tokens = max(map(len, work.prompts)), max(work.output_lens)
        ids = torch.zeros(len(work.prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(work.prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        out = net.generate(
            ids,
            attention_mask=mask,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            do_sample=False,
        )
        assert out.shape[1] == longest + num_tokens

    return run


def llama_cpp(_: str, floats: str, threads: int) -> Run:
    del floats  # it reads the demo's own file
    import xllamacpp
    from nv_models.locate import demo_file

    params = xllamacpp.CommonParams()
    params.model.path = str(demo_file())
    params.n_parallel = 16
    params.n_ctx = 16 * 1024
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cont_batching = True
    server = xllamacpp.Server(params)
    pool = ThreadPoolExecutor(16)

    def one(prompt: list[int], num_tokens: int) -> int:
        answer = server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        if not isinstance(answer, dict):
            answer = json.loads(answer)
        return int(answer["usage"]["completion_tokens"])

    def run(work: Workload) -> None:
        counts = list(pool.map(one, work.prompts, work.output_lens))
        assert counts == work.output_lens, counts

    return run


ENGINES = {"nv": nv, "before": nv, "transformers": transformers, "llama.cpp": llama_cpp}


def held_mib(dtype: str, floats: str) -> float:
    """MiB that this process holds more once nv has loaded a model and used all its weights."""
    from nv_models import load_model, resolve
    from quantized_accuracy import reader

    read_some = list(range(40))
    reader(load_model(SMALL, dtype="bfloat16"), 64, "cpu")(read_some)  # what every process holds
    gc.collect()
    before = resident_mib()
    model = load_model(resolve("demo") if dtype == Q4_1 else floats, dtype="bfloat16")
    reader(model, 64, "cpu")(read_some)
    gc.collect()
    return round(resident_mib() - before, 1)


def resident_mib() -> float:
    """Of this process: its own memory and pages of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    return sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1024


def serve(worker: str, floats: str, threads: int) -> None:
    """Run the works that come as lines, and print the seconds of each as a line."""
    engine, dtype = worker.split()
    run = ENGINES[engine](dtype, floats, threads)
    run(mixed_workload(16, 0))
    run(uniform_workload(1, 64, 8, 99))
    clock = time.process_time if threads == 1 else time.perf_counter
    print("ready", flush=True)
    for line in sys.stdin:
        name, seed = line.split()
        work = WORK[name](int(seed))
        start = clock()
        run(work)
        print(work.num_output_tokens / (clock() - start), flush=True)


def in_own_process(dtype: str, floats: str) -> float:
    """The figure of `held_mib`; large allocations are returned when they are freed."""
    words = [sys.executable, __file__, "--held", dtype, floats, "--threads=1"]
    own = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=own)
    return float(done.stdout.splitlines()[-1])


class Worker:
    """An engine in a process of its own, which waits while it is not its turn."""

    def __init__(self, name: str, floats: str, args: argparse.Namespace) -> None:
        words = [sys.executable, __file__, "--only", name, floats, f"--threads={args.threads}"]
        own = dict(os.environ) | {"OMP_NUM_THREADS": str(args.threads)}
        if name.startswith("before"):
            packages = Path(args.before).resolve().glob("packages/*/src")
            own["PYTHONPATH"] = os.pathsep.join(map(str, packages))
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own
        )
        self._wait_for("ready")

    def rate(self, work: str, seed: int) -> float:
        """Tokens per second of one run."""
        assert self.process.stdin
        self.process.stdin.write(f"{work} {seed}\n")
        self.process.stdin.flush()
        return float(self._wait_for(""))

    def _wait_for(self, word: str) -> str:
        """The next line that is this word, or any number; an engine may print others."""
        assert self.process.stdout
        for line in self.process.stdout:
            text = line.strip()
            if text == word or (not word and text.replace(".", "").isdigit()):
                return text
        raise RuntimeError(f"a worker ended with {self.process.wait()}")

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def measure(args: argparse.Namespace, floats: str) -> dict[str, dict[str, list[float]]]:
    """Tokens per second of each turn, by worker and work."""
    workers = {name: Worker(name, floats, args) for name in args.workers}
    rates: dict[str, dict[str, list[float]]] = {
        name: {work: [] for work in WORK} for name in workers
    }
    for work in WORK:  # warm-up
        for worker in workers.values():
            worker.rate(work, 0)
    for turn in range(args.repeats):
        for work in WORK:
            for name, worker in workers.items():
                rates[name][work].append(worker.rate(work, turn + 1))
    for worker in workers.values():
        worker.close()
    return rates


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the turns' ratios."""
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--workers", nargs="*", default=WORKERS, metavar="ENGINE DTYPE")
    parser.add_argument("--before", help="another checkout")
    parser.add_argument("--only", nargs=2, metavar=("WORKER", "FOLDER"), help="in this process")
    parser.add_argument("--held", nargs=2, metavar=("DTYPE", "FOLDER"), help="in this process")
    parser.add_argument("--save")
    args = parser.parse_args()
    if args.held:
        print(held_mib(*args.held))
        return
    if args.only:
        serve(*args.only, args.threads)
        return
    from nv_models import resolve
    from round_to_nearest import Floats

    if args.before:
        args.workers = (*args.workers, "before bfloat16", "before float32")
    with tempfile.TemporaryDirectory() as folder:
        floats = Floats.read(resolve("demo")).write(Path(folder) / "floats")
        held = {dtype: in_own_process(dtype, str(floats)) for dtype in (Q4_1, "bfloat16")}
        rates = measure(args, str(floats))
    figures: dict[str, Any] = {
        "model": "demo",
        "threads": args.threads,
        "clock": "processor" if args.threads == 1 else "wall",
        "tokens_per_second": {
            name: {work: round(statistics.median(each), 1) for work, each in found.items()}
            for name, found in rates.items()
        },
        "ratios": {
            f"{ours} / {theirs}": {
                work: ratio(rates[ours][work], rates[theirs][work]) for work in WORK
            }
            for ours, theirs in RATIOS
            if {ours, theirs} <= rates.keys()
        },
        "weights_held_mib": held,
        "load_average": round(os.getloadavg()[0], 1),
    }
    report("cpu", figures, args.save)


if __name__ == "__main__":
    main()
