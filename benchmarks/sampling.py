"""The cost of sampling controls: milliseconds per step of a decoding batch, against a plain one.

The cases run one after another in the same engine: first the plain batch, before any control was
used, and last the plain batch again. A time is that between the results of two steps in which every
row decodes, so host work counts only if the card waits for it.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from nv_api import LLM, SamplingParams
from profiling import profiled
from report import report
from workload import QWEN3, Workload, model_folder, uniform_workload

FULL = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "top_p": 0.9,
    "logprobs": 5,
}
PENALTIES = {name: value for name, value in FULL.items() if name.endswith("penalty")}
LISTS = {
    "logit_bias": dict.fromkeys(range(0, 2000, 100), 0.5),
    "bad_words_token_ids": [[token, token + 1] for token in range(50)],
    "allowed_token_ids": list(range(5000)),
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "top_p top_k": {"top_p": 0.9, "top_k": 50},
    "full": FULL,
    "one full row": FULL,
    "min_p": {"min_p": 0.05},
    "lists": LISTS,
    "penalties": PENALTIES,
    "logprobs": {"logprobs": 5},
    "plain again": {},
}
WARM_STEPS = 4
"""Steps of a full batch that are not counted: the first follow prompts."""


def small_folder() -> Path:
    """A model that a CPU runs fast, with the vocabulary of the others."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    return model_folder("qwen3-0.6b", **heads, **sizes)


def parameters(case: str, batch: int, output_len: int) -> list[SamplingParams]:
    """Of every row."""
    shared = {"max_tokens": output_len, "ignore_eos": True}
    asking = 1 if case == "one full row" else batch
    plain = SamplingParams(**shared)
    return [SamplingParams(**shared, **CASES[case])] * asking + [plain] * (batch - asking)


def step_ms(llm: LLM, work: Workload, params: list[SamplingParams]) -> float:
    """Mean time of the steps in which every row decodes."""
    for prompt, prompt_params in zip(work.prompts, params, strict=True):
        llm.add_request(prompt, prompt_params)
    ends = []
    while not llm.is_finished():
        _, num_tokens = llm.step()
        if num_tokens == -len(work.prompts):
            ends.append(time.perf_counter())
    counted = ends[WARM_STEPS:]
    return (counted[-1] - counted[0]) / (len(counted) - 1) * 1e3


def measure(
    folder: Path, batch: int, prompt_len: int, output_len: int, repeats: int, profile: bool
) -> dict[str, Any]:
    """Milliseconds per step of each case, the median of `repeats` runs, and their summary."""
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": batch}
    figures: dict[str, Any] = {}
    seed = 0
    with LLM(str(folder), **options) as llm:

        def run(case: str, output_len: int = output_len) -> float:
            nonlocal seed
            seed += 1  # new prompts each time, so that no prefix is cached
            work = uniform_workload(batch, prompt_len, output_len, seed)
            return step_ms(llm, work, parameters(case, batch, output_len))

        times = {}
        for case in CASES:
            run(case)  # compiles, captures, allocates tables
            times[case] = [run(case) for _ in range(repeats)]
        if profile:
            cases = ("plain", "full")
            figures["profile"] = {case: profiled(partial(run, case, 32)) for case in cases}
    medians = {case: statistics.median(each) for case, each in times.items()}
    plain = medians["plain"]
    return {
        "ms_per_step": {case: round(each, 4) for case, each in medians.items()},
        "all_ms_per_step": {case: [round(t, 4) for t in each] for case, each in times.items()},
        "over_plain": {case: round(each / plain, 4) for case, each in medians.items()},
        "full_within_15_percent": medians["full"] <= 1.15 * plain,
        "plain_again_within_1_percent": medians["plain again"] <= 1.01 * plain,
        **figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*QWEN3, "small"], default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--save")
    args = parser.parse_args()
    folder = small_folder() if args.model == "small" else model_folder(args.model)
    sizes = {"batch": args.batch, "prompt_len": args.prompt_len, "output_len": args.output_len}
    figures = measure(folder, **sizes, repeats=args.repeats, profile=args.profile)
    report("sampling", {"engine": "nv", "model": args.model, **sizes, **figures}, args.save)


if __name__ == "__main__":
    main()
