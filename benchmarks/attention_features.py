"""The cost of a window, a softcap and sinks in attention, on one card.

Each step is timed in turn with the same step without the feature, or for a window with a step of
contexts as long as the window. The figure is the ratio of the two times; a ratio above its bound
ends the run with an error. Every step is checked against the definition, as in `kernels.py`.
"""

import argparse
from dataclasses import dataclass, replace
from statistics import median

from attention_work import Case, Work, decode, graph_microseconds
from kernels_attention import checked
from report import report

ROUNDS = 5
LAUNCHES = 10


@dataclass(frozen=True)
class Pair:
    """Two steps to compare.

    Attributes:
        case: with a feature.
        beside: without it.
        bound: the highest ratio of their times; None: it has no goal yet.
    """

    case: Case
    beside: Case
    bound: float | None


def decode_pairs() -> list[Pair]:
    """Decode rows: a window costs what contexts of its length cost, the others next to nothing."""
    pairs = []
    for cache in ({}, {"fp8": True}):
        long, short = decode("32 x 8192", [8192] * 32, **cache), decode("32 x 1024", [1024] * 32)
        short = replace(short, **cache)
        pairs.append(Pair(replace(long, window=1024), short, 1.3))
        for step in (long, decode("256 x 820", [820] * 256, **cache)):
            pairs.append(Pair(replace(step, softcap=50.0), step, 1.03))
            pairs.append(Pair(replace(step, sinks=True), step, 1.03))
    oss = {"heads": (64, 8), "head_dim": 64}  # gpt-oss's heads and window
    long, short = decode("64 x 4096", [4096] * 64, **oss), decode("64 x 128", [128] * 64, **oss)
    pairs.append(Pair(replace(long, window=128, sinks=True), short, 1.3))
    return pairs


def chunk_pairs() -> list[Pair]:
    """Chunk rows: on a Hopper card a feature also means the kernel of every card."""
    prompts = Case("prefill 16 x 1024", ((1024, 1024),) * 16)
    long = Case("prefill 2 x 8192", ((8192, 8192),) * 2)
    return [
        Pair(replace(prompts, softcap=50.0), prompts, None),
        Pair(replace(prompts, sinks=True), prompts, None),
        Pair(replace(long, window=1024), long, None),
    ]


def label(case: Case) -> str:
    """The step's name, its cache and its features."""
    words = [case.name, *(["fp8"] if case.fp8 else [])]
    for feature in case.spec.features:
        value = getattr(case, feature)
        words.append(feature if value is True else f"{feature} {value:g}")
    return ", ".join(words)


def measure(pair: Pair) -> dict[str, float | None]:
    """Check both steps, then time them in turn."""
    works = [Work(pair.case, 2), Work(pair.beside, 2)]
    errors = [checked(work, work.attend, LAUNCHES, 2)[1] for work in works]
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for work, found in zip(works, times, strict=True):
            found.append(graph_microseconds(work.attend, LAUNCHES))
    ours, beside = (median(found) for found in times)
    ratio = median(a / b for a, b in zip(*times, strict=True))
    return {
        "microseconds": round(ours, 2),
        "beside_microseconds": round(beside, 2),
        "ratio": round(ratio, 4),
        "bound": pair.bound,
        "error": max(errors),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save")
    args = parser.parse_args()
    found = {}
    for pair in decode_pairs() + chunk_pairs():
        name = f"{label(pair.case)} / {label(pair.beside)}"
        found[name] = measure(pair)
        print(name, found[name], flush=True)
    report("attention_features", {"pairs": found}, args.save)
    above = [
        name for name, at in found.items() if at["bound"] is not None and at["ratio"] > at["bound"]
    ]
    if above:
        raise SystemExit(f"above the bound: {'; '.join(above)}")


if __name__ == "__main__":
    main()
