"""The whole engine with quantized weights on one card, beside bf16: Qwen3-8B's shape.

    python benchmarks/quantized_engine.py --save FILE

Each form is a process of its own, with random weights and an empty folder of compiled kernels; a
second one starts once more with the compiled kernels. The figures of a form:

- milliseconds per token of one request, and per step of 16, as `latency.py` measures them;
- seconds of the reference workload (`throughput.py`), after one with other prompts;
- seconds from `LLM(...)` to the first token, with empty and with warm kernel caches;
- bytes of the weights as the plan counts them; as shares of it, what the card holds of them, and
  the most while they are made.

The file is written after each form. A form is left out if less than `--form-seconds` of `--seconds`
are left. `--small` runs every part on a CPU in a minute; its times mean nothing.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from report import report
from round_to_nearest import awq, compressed, fp8_blocks, int8, packed
from workload import QWEN3, TINY, Workload, model_folder, reference_workload, uniform_workload

PROMPT_LEN, OUTPUT_LEN = 128, 256
BATCHES = (1, 16)
FIRST = Workload([[1, 2, 3]], [1])
SMALL = TINY | {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4,
                "head_dim": 32, "vocab_size": 12000, "eos_token_id": 2}  # fmt: skip
"""Each matrix has whole blocks of 128 rows and columns."""


FP8_ROWS = compressed(
    "float-quantized",
    {"num_bits": 8, "type": "float", "strategy": "channel"},
    {"num_bits": 8, "type": "float", "strategy": "token"},
)
FORMS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "bf16": (None, {}),
    "fp8 rows": (FP8_ROWS, {}),
    "4 bits": (packed(4, 128).config, {}),
    "fp8 rows, fp8 KV": (FP8_ROWS, {"kv_cache_dtype": "fp8"}),
    "fp8 blocks": (fp8_blocks().config, {}),
    "AWQ": (awq(128).config, {}),
    "int8": (int8().config, {}),
}
"""A quantization_config, and options of LLM."""
REQUESTED = "requested_bytes.all."
"""Of `torch.cuda.memory_stats`: bytes of tensors, without the rest of the allocator's blocks."""
COLUMNS = {
    "ms_per_token": "ms/token",
    "ms_per_step_of_16": "step of 16",
    "step_of_16_share": "of bf16",
    "workload_seconds": "workload s",
    "warm_start_seconds": "start s",
    "cold_start_seconds": "cold s",
    "weights_gib": "GiB",
    "held_share": "held/plan",
}


class Form:
    """One form in this process."""

    def __init__(self, name: str, model: str, *, small: bool) -> None:
        config, options = FORMS[name]
        changes = (SMALL if small else {}) | ({"quantization_config": config} if config else {})
        self.folder = str(model_folder(model, **changes))
        self.small = small
        self.options = {"max_model_len": 4096, **options}
        if small:
            self.options |= {"device": "cpu", "max_num_seqs": 16, "max_model_len": 512}

    def start(self, caches: str) -> dict[str, float]:
        """Start an engine and generate one token, with "cold" or "warm" caches of kernels."""
        from engines import nv

        start = time.perf_counter()
        self.run = nv(self.folder, **self.options)
        made = time.perf_counter()
        self.run(FIRST)
        seconds = {"start": time.perf_counter() - start, "construct": made - start}
        return {f"{caches}_{name}_seconds": round(each, 3) for name, each in seconds.items()}

    def speed(self, repeats: int) -> dict[str, Any]:
        """The first start, and all that is timed after it."""
        figures: dict[str, Any] = self.start("cold")
        for batch, name in zip(BATCHES, ("ms_per_token", "ms_per_step_of_16"), strict=True):
            figures[name] = round(self.step_ms(batch, repeats), 4)
        figures["workload_seconds"] = round(self.workload_seconds(), 3)
        metrics = self.run.llm.get_metrics()
        return figures | {name: metrics[name] for name in ("num_blocks", "num_preemptions")}

    def size(self) -> dict[str, Any]:
        """The second start, and the weights alone after it."""
        figures = self.start("warm")
        self.run.llm.close()
        del self.run
        gc.collect()
        return figures | self.weights()

    def step_ms(self, batch: int, repeats: int) -> float:
        """The time of OUTPUT_LEN tokens less that of one, per step; medians of `repeats` runs."""
        prompt_len, output_len = (8, 4) if self.small else (PROMPT_LEN, OUTPUT_LEN)
        seconds: dict[int, list[float]] = {1: [], output_len: []}
        for seed in range(repeats + 1):  # new prompts each time, so that no prefix is cached
            for index, length in enumerate(seconds):
                work = uniform_workload(batch, prompt_len, length, 100 * batch + 2 * seed + index)
                seconds[length].append(self.run(work))
        one, all_ = (statistics.median(each[1:]) for each in seconds.values())
        return (all_ - one) / (output_len - 1) * 1e3

    def workload_seconds(self) -> float:
        """The reference workload after one of other prompts, which captures the graphs."""
        works = [reference_workload(seed=seed) for seed in (1, 0)]
        if self.small:
            works = [Workload([ids[:9] for ids in work.prompts[:4]], [3] * 4) for work in works]
        return [self.run(work) for work in works][-1]

    def weights(self) -> dict[str, float]:
        """The bytes of the weights in the plan; the card's, the most while they are made, and the
        seconds that this takes.
        """
        import torch
        from nv_models import plan_model

        device = "cuda" if torch.cuda.is_available() else "cpu"
        plan = plan_model(self.folder, load_format="dummy", device=device)
        found = {"weights_bytes": plan.num_bytes, "weights_gib": round(plan.num_bytes / 2**30, 2)}
        if device == "cpu":
            return found
        before = torch.cuda.memory_stats()[REQUESTED + "current"]
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        model = plan.load()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        gc.collect()
        stats = torch.cuda.memory_stats()
        held, peak = (
            (stats[REQUESTED + at] - before) / plan.num_bytes for at in ("current", "peak")
        )
        del model
        return found | {
            "held_share": round(held, 4),
            "peak_share": round(peak, 4),
            "make_weights_seconds": round(seconds, 3),
        }


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of a form, from two processes."""
    with tempfile.TemporaryDirectory() as caches:
        folders = {"XDG_CACHE_HOME": caches, "TRITON_CACHE_DIR": f"{caches}/triton"}
        figures = child(name, "speed", args, folders)
        return figures if "error" in figures else figures | child(name, "size", args, folders)


def child(
    name: str, part: str, args: argparse.Namespace, environment: dict[str, str]
) -> dict[str, Any]:
    """Some figures of a form from a process of its own, whose last line is JSON."""
    words = [sys.executable, __file__, "--only", name, part, f"--model={args.model}"]
    words += [f"--repeats={args.repeats}", *(["--small"] if args.small else [])]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | environment
    )
    if done.returncode:
        return {"error": f"{part}: the process ended with {done.returncode}"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def with_shares(forms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The steps of 16 as shares of bf16's, where it was measured."""
    whole = forms.get("bf16", {}).get("ms_per_step_of_16")
    return {
        name: each | {"step_of_16_share": round(each["ms_per_step_of_16"] / whole, 3)}
        if whole and "ms_per_step_of_16" in each
        else each
        for name, each in forms.items()
    }


def table(forms: dict[str, dict[str, Any]]) -> str:
    """A line for each form."""
    lines = [f"{'':18}" + "".join(f"{title:>12}" for title in COLUMNS.values())]
    for name, figures in forms.items():
        cells = "".join(f"{figures.get(key, '-'):>12}" for key in COLUMNS)
        lines.append(f"{name:18}{cells}{'  ' + figures['error'] if 'error' in figures else ''}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=QWEN3, default="qwen3-8b")
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=list(FORMS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of the whole run")
    parser.add_argument("--form-seconds", type=float, default=75, help="that a form may take")
    parser.add_argument("--small", action="store_true", help="a tiny shape on a CPU")
    parser.add_argument("--only", nargs=2, metavar=("FORM", "PART"), help="in this process")
    parser.add_argument("--save")
    args = parser.parse_args()
    if args.only:
        form = Form(args.only[0], args.model, small=args.small)
        print(json.dumps(form.size() if args.only[1] == "size" else form.speed(args.repeats)))
        return
    end, forms = time.monotonic() + args.seconds, {}
    for name in args.forms:
        if end - time.monotonic() < args.form_seconds:
            forms[name] = {"error": "not run: too little time was left"}
            continue
        forms[name] = measure(name, args)
        report("quantized_engine", {"model": args.model, "forms": with_shares(forms)}, args.save)
    print(table(with_shares(forms)))


if __name__ == "__main__":
    main()
