"""Texts and pairs that are pooled: tokens per second beside prompts of the same run, and pairs with
a shared query with and without the prefix cache.

Dummy weights. `--small` runs every part on a CPU with a tiny shape, where its figures say nothing.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nv_kernels as nk
from nv_api import LLM, SamplingParams
from nv_models.layers.embedding import Head
from report import report
from workload import QWEN3, TINY, VOCAB, model_folder

NEVER: dict[str, Any] = {"logits": Head, "sample": nk, "keep_tokens": nk}
"""The head and the draw, by name and owner: a step that pools must not call them."""
SMALL: dict[str, Any] = TINY | {"vocab_size": 512, "eos_token_id": 0}
RERANKER = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=QWEN3, default="qwen3-0.6b")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--text-len", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=1_000)
    parser.add_argument("--query-len", type=int, default=512)
    parser.add_argument("--document-len", type=int, default=128)
    parser.add_argument("--small", action="store_true", help="a tiny shape on a CPU")
    parser.add_argument("--save")
    args = parser.parse_args()
    name, changes = ("qwen3-0.6b", SMALL) if args.small else (args.model, {})
    figures = measure(
        model_folder(name, **changes),
        model_folder(name, **changes | RERANKER),
        changes.get("vocab_size", VOCAB),
        num_texts=args.texts,
        text_len=args.text_len,
        num_pairs=args.pairs,
        query_len=args.query_len,
        document_len=args.document_len,
    )
    report("pooling", {"model": "small" if args.small else args.model, **figures}, args.save)


def measure(
    folder: Path,
    reranker: Path,
    vocab: int,
    *,
    num_texts: int,
    text_len: int,
    num_pairs: int,
    query_len: int,
    document_len: int,
) -> dict[str, Any]:
    """All figures of a model's shape, and of the same shape with a head of one label."""
    rng = random.Random(0)
    texts = [ids(rng, vocab, text_len) for _ in range(num_texts)]
    more = [ids(rng, vocab, text_len) for _ in range(num_texts)]
    generated = prefill_seconds(folder, more, texts)
    embedded, launches = embed_seconds(folder, more, texts)
    query = ids(rng, vocab, query_len)
    documents = [ids(rng, vocab, document_len) for _ in range(num_pairs)]
    cold, _ = score_seconds(reranker, query, documents, enable_prefix_caching=False)
    warm, hits = score_seconds(reranker, query, documents, enable_prefix_caching=True)
    num_tokens = num_texts * text_len
    return {
        "texts": num_texts,
        "text_len": text_len,
        "prefill_tokens_per_second": round(num_tokens / generated),
        "embed_tokens_per_second": round(num_tokens / embedded),
        "embed_over_prefill": round(generated / embedded, 3),
        "calls_of_head_and_draw": launches,
        "pairs": num_pairs,
        "query_len": query_len,
        "document_len": document_len,
        "pairs_seconds": round(cold, 4),
        "pairs_seconds_with_prefix_cache": round(warm, 4),
        "cached_over_all": round(warm / cold, 3),
        "pairs_with_a_hit": hits,
    }


def ids(rng: random.Random, vocab: int, length: int) -> list[int]:
    """Random ids, of which none ends a text."""
    return [rng.randrange(1, vocab) for _ in range(length)]


def opened(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, **options
    )


def prefill_seconds(folder: Path, warm: list[list[int]], texts: list[list[int]]) -> float:
    """Seconds for the prompts of texts, with one greedy token each."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with opened(folder, enable_prefix_caching=False) as llm:
        llm.generate(warm, params, use_tqdm=False)
        return seconds(lambda: llm.generate(texts, params, use_tqdm=False))


def embed_seconds(
    folder: Path, warm: list[list[int]], texts: list[list[int]]
) -> tuple[float, dict[str, int]]:
    """Seconds for the embeddings of texts, and how often head and draw were called."""
    with counted() as calls, opened(folder, runner="pooling", enable_prefix_caching=False) as llm:
        llm.embed(warm, use_tqdm=False)
        return seconds(lambda: llm.embed(texts, use_tqdm=False)), calls


def score_seconds(
    reranker: Path, query: list[int], documents: list[list[int]], **options: bool
) -> tuple[float, int]:
    """Seconds for the scores of one query with documents, and how many found cached tokens."""
    with opened(reranker, **options) as llm:
        llm.score([query[::-1]], [each[::-1] for each in documents], use_tqdm=False)
        outputs: list[Any] = []
        spent = seconds(lambda: outputs.extend(llm.score([query], documents, use_tqdm=False)))
    return spent, sum(output.num_cached_tokens > 0 for output in outputs)


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the calls of each name of NEVER; a call inside a captured graph counts once."""
    calls = dict.fromkeys(NEVER, 0)
    kept = {name: getattr(owner, name) for name, owner in NEVER.items()}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            calls[name] += 1
            return kept[name](*args, **more)

        return call

    try:
        for name, owner in NEVER.items():
            setattr(owner, name, counting(name))
        yield calls
    finally:
        for name, op in kept.items():
            setattr(NEVER[name], name, op)


if __name__ == "__main__":
    main()
