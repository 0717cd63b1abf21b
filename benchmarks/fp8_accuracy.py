"""The accuracy of an fp8 KV cache: a model on real text, fp8 against the model's own dtype.

The log-probabilities of prompt tokens are compared, because there both caches hold the same text;
greedy answers are compared up to the first difference. Runs on a CPU or a card, with any model. A
model without a tokenizer, as `train_tiny.py` makes it, reads bytes of files that were not in its
training data.
"""

import argparse
import math
import statistics
from itertools import chain
from pathlib import Path

from nv_api import LLM, SamplingParams
from report import report
from train_tiny import held_out_passages

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


def reads_bytes(model: str) -> bool:
    """True for a checkpoint's folder that has no tokenizer."""
    return Path(model).is_dir() and not any(Path(model).glob("tokenizer*"))


def prompts_for(model: str, num_passages: int, passage_length: int) -> list[str] | list[list[int]]:
    """Paragraphs for a model with a tokenizer, held-out bytes for one without."""
    if reads_bytes(model):
        return held_out_passages(num_passages, passage_length)
    licence = Path(__file__).parents[1].joinpath("LICENSE").read_text(encoding="utf-8")
    return [*TEXTS, licence]  # a text that does not change from one run to the next


def run(args: argparse.Namespace, dtype: str, kv_cache_dtype: str):
    """Log-probabilities of each prompt's own tokens, and greedy answers."""
    params = SamplingParams(
        temperature=0, max_tokens=args.num_tokens, ignore_eos=True, prompt_logprobs=0
    )
    prompts = prompts_for(args.model, args.num_passages, args.passage_length)
    options = {"max_num_seqs": args.max_num_seqs, "skip_tokenizer_init": reads_bytes(args.model)}
    with LLM(args.model, dtype=dtype, kv_cache_dtype=kv_cache_dtype, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
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
    """Share of tokens before the first difference."""
    same = 0
    for answer, other in zip(answers, others, strict=True):
        pairs = zip(answer, other, strict=True)
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(answer))
    return same / sum(map(len, answers))


def distances(logprobs: list[list[float]], others: list[list[float]]) -> list[float]:
    """Of each token's log-probabilities, in nats."""
    pairs = zip(chain.from_iterable(logprobs), chain.from_iterable(others), strict=True)
    return [abs(a - b) for a, b in pairs]


def perplexity(logprobs: list[list[float]]) -> float:
    """Of all tokens together."""
    return round(math.exp(-statistics.mean(chain.from_iterable(logprobs))), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--num-tokens", type=int, default=64, help="per greedy answer")
    parser.add_argument("--num-passages", type=int, default=64, help="without a tokenizer")
    parser.add_argument(
        "--passage-length", type=int, default=448, help="in bytes, without a tokenizer"
    )
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--save")
    args = parser.parse_args()
    kinds = {"fp32": ("float32", "auto"), "bf16": ("bfloat16", "auto"), "fp8": ("bfloat16", "fp8")}
    runs = {name: run(args, *kind) for name, kind in kinds.items()}
    figures: dict[str, object] = {
        "model": Path(args.model).name,
        "tokens": sum(map(len, runs["fp32"][0])),
    }
    truth, answers = runs["fp32"]
    for name in ("bf16", "fp8"):
        errors = distances(runs[name][0], truth)
        figures[name] = {
            "mean_logprob_error": round(statistics.mean(errors), 5),
            "largest_logprob_error": round(max(errors), 4),
            "perplexity": perplexity(runs[name][0]),
            "greedy_tokens_as_fp32": round(agreement(runs[name][1], answers), 3),
        }
    figures["fp32_perplexity"] = perplexity(truth)
    fp8_from_bf16 = distances(runs["fp8"][0], runs["bf16"][0])
    figures["mean_logprob_distance_fp8_bf16"] = round(statistics.mean(fp8_from_bf16), 5)
    figures["greedy_tokens_fp8_as_bf16"] = round(agreement(runs["fp8"][1], runs["bf16"][1]), 3)
    report("fp8_accuracy", figures, args.save)


if __name__ == "__main__":
    main()
