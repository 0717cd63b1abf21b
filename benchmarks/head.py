"""The cost of fp32 logits on a card: the head, the head and a draw, and whole decode steps.

bf16 and fp32 logits alternate, on the heads of Qwen3-0.6B and 8B (151,936 tokens), in CUDA graphs
with rotated weights; then decode steps of Qwen3-0.6B with dummy weights in two engines after
another, with drawn tokens and with filters. `is_rounded` in nv_kernels' linear/triton/logits.py
decides which logits a step gets; a row count whose step becomes more than 1 % slower should get
bf16. Prints a table last.
"""

import argparse
import statistics
from typing import Any
from unittest import mock

import torch
from nv_api import LLM
from nv_kernels.linear.triton import logits
from nv_kernels.sampling import triton_sample as sampling
from report import report
from sampling import parameters, step_ms
from step_parts import BF16, DEVICE, sampling_tensors, time_each
from workload import QWEN3, VOCAB, model_folder, uniform_workload

ROWS = (1, 64, 256)
IS_ROUNDED = {"bf16": lambda *_: True, "fp32": lambda *_: False}
DRAWS = {
    "greedy": (0, 0, 1.0, 0.0),
    "temperature": (None, 0, 1.0, 0.0),
    "top_k 50": (None, 50, 1.0, 0.0),
    "top_p 0.9": (None, 0, 0.9, 0.0),
}
STEPS = ("plain", "greedy", "top_p top_k")
OUTPUT_LEN = 96


def kernel_us(model: str) -> list[dict[str, Any]]:
    """Microseconds of a model's head alone and with each draw."""
    hidden = QWEN3[model][1]
    count = 2 if hidden < 4096 else 1  # one 8B head is larger than any cache
    weights = [(torch.randn(VOCAB, hidden, device=DEVICE) * 0.05).to(BF16) for _ in range(count)]
    found = []
    for rows in ROWS:
        x = torch.randn(rows, hidden, device=DEVICE).to(BF16)
        draws = {name: sampling_tensors(rows, *setting) for name, setting in DRAWS.items()}
        for dtype, is_rounded in IS_ROUNDED.items():
            with mock.patch.object(logits, "is_rounded", is_rounded):
                row = {"what": f"{model} head", "rows": rows, "logits": dtype, "unit": "us"}
                row["head"] = time_each(lambda w, x=x: logits.logits(x, w), weights)
                for name, draw in draws.items():

                    def work(weight: torch.Tensor, x: Any = x, draw: Any = draw) -> torch.Tensor:
                        return sampling.sample(logits.logits(x, weight), draw)

                    row[name] = time_each(work, weights)
            found.append(row)
    return found


def engine_ms(repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of a decode step of Qwen3-0.6B; engines with bf16, fp32 and bf16 logits."""
    folder, found, seed = model_folder("qwen3-0.6b"), [], 0
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": max(ROWS)}
    for dtype in (*IS_ROUNDED, "bf16"):
        with (
            mock.patch.object(logits, "is_rounded", IS_ROUNDED[dtype]),
            LLM(str(folder), max_model_len=1024, **options) as llm,
        ):
            for rows in ROWS:
                row = {"what": "0.6B step", "rows": rows, "logits": dtype, "unit": "ms"}
                for case in STEPS:
                    times = []
                    for _ in range(1 + repeats):
                        seed += 1  # new prompts each time, so that no prefix is cached
                        work = uniform_workload(rows, 128, OUTPUT_LEN, seed)
                        times.append(step_ms(llm, work, parameters(case, rows, OUTPUT_LEN)))
                    row[case] = statistics.median(times[1:])
                found.append(row)
    return found


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line per case: bf16, fp32 and their ratio; the mean if a case has several runs."""
    print(f"\n{'':36}{'rows':>5}{'bf16':>10}{'fp32':>10}{'ratio':>8}")
    cases: dict[tuple[str, int, str, str], dict[str, list[float]]] = {}
    for row in rows:
        for name in row.keys() - {"what", "rows", "logits", "unit"}:
            key = (row["what"], row["rows"], name, row["unit"])
            cases.setdefault(key, {}).setdefault(row["logits"], []).append(row[name])
    for (what, count, name, unit), times in sorted(cases.items()):
        bf16, fp32 = (statistics.mean(times[dtype]) for dtype in IS_ROUNDED)
        cells = f"{bf16:10.3f}{fp32:10.3f}{fp32 / bf16:8.3f}"
        print(f"{f'{what}, {name} ({unit})':36}{count:5}{cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="of an engine's runs")
    parser.add_argument("--save")
    args = parser.parse_args()
    rows = engine_ms(args.repeats)
    for model in ("qwen3-0.6b", "qwen3-8b"):
        rows += kernel_us(model)
    report("head", {"rows": rows}, args.save)
    print_table(rows)


if __name__ == "__main__":
    main()
