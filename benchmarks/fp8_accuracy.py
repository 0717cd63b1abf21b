"""What an fp8 KV cache costs in exactness: the demo model on real text, fp8 against its own dtype.

Prompt tokens' log-probabilities are compared where both caches see the same text; greedy answers
until they first differ. Runs on a CPU or a card.
"""

import argparse
import math
import statistics
from itertools import chain
from pathlib import Path

from nv_api import LLM, SamplingParams
from report import report

TEXTS = [
    "The capital of France is Paris, and the capital of Italy is Rome. The capital of Spain is",
    "Water boils at one hundred degrees Celsius at sea level. On a high mountain it boils at a",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "The three primary colours are red, yellow and blue. Mixing blue and yellow makes",
    "Photosynthesis is the process by which plants turn light, water and carbon dioxide into",
    "Dear Sir or Madam,\n\nI am writing to apply for the position of",
    "To make a simple tomato soup, first chop two onions and fry them gently in olive oil. Then",
]


def run(dtype: str, kv_cache_dtype: str, paragraphs: list[str], num_tokens: int):
    """Log-probabilities of each prompt's own tokens, and greedy answers."""
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, prompt_logprobs=0
    )
    with LLM("demo", dtype=dtype, kv_cache_dtype=kv_cache_dtype, max_num_seqs=8) as llm:
        outputs = llm.generate(paragraphs, params, use_tqdm=False)
    own = [
        [
            entry[token].logprob
            for token, entry in zip(o.prompt_token_ids, o.prompt_logprobs, strict=True)
            if entry
        ]
        for o in outputs
    ]
    return own, [list(o.outputs[0].token_ids) for o in outputs]


def agreement(answers: list[list[int]], others: list[list[int]]) -> float:
    """Share of tokens ahead of the first difference."""
    same = 0
    for answer, other in zip(answers, others, strict=True):
        pairs = zip(answer, other, strict=True)
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(answer))
    return same / sum(map(len, answers))


def perplexity(logprobs: list[list[float]]) -> float:
    """Of all tokens together."""
    return round(math.exp(-statistics.mean(chain.from_iterable(logprobs))), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--save")
    args = parser.parse_args()
    manual = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    paragraphs = [*TEXTS, manual[:3000]]
    runs = {
        name: run(dtype, kv, paragraphs, args.num_tokens)
        for name, dtype, kv in (
            ("fp32", "float32", "auto"), ("bf16", "bfloat16", "auto"), ("fp8", "bfloat16", "fp8"),
        )
    }  # fmt: skip
    figures: dict[str, object] = {"model": "demo", "tokens": sum(map(len, runs["fp32"][0]))}
    truth, answers = runs["fp32"]
    for name in ("bf16", "fp8"):
        errors = [
            abs(a - b)
            for mine, other in zip(runs[name][0], truth, strict=True)
            for a, b in zip(mine, other, strict=True)
        ]
        figures[name] = {
            "mean_logprob_error": round(statistics.mean(errors), 5),
            "largest_logprob_error": round(max(errors), 4),
            "perplexity": perplexity(runs[name][0]),
            "greedy_tokens_as_fp32": round(agreement(runs[name][1], answers), 3),
        }
    figures["fp32_perplexity"] = perplexity(truth)
    figures["greedy_tokens_fp8_as_bf16"] = round(agreement(runs["fp8"][1], runs["bf16"][1]), 3)
    report("fp8_accuracy", figures, args.save)


if __name__ == "__main__":
    main()
