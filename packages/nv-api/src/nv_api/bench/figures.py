"""Figures: the numbers of a run, under vLLM's names.

Owns the statistics. Never prints.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nv_api.bench.load import METRICS
from nv_api.bench.outcome import Outcome
from nv_api.bench.pace import Run


def figures(
    run: Run, percentiles: Sequence[float], bounds: Mapping[str, float]
) -> dict[str, float | int | None]:
    """Counts, rates per second, and times in milliseconds.

    Args:
        run: of `pace.run`.
        percentiles: of each time.
        bounds: in milliseconds; requests that meet all of them are the goodput.
    """
    whole = run.whole
    num_input = sum(each.num_prompt for each in whole)
    num_output = sum(each.num_output for each in whole)
    good = sum(all(_within(each, *bound) for bound in bounds.items()) for each in whole)
    found: dict[str, float | int | None] = {
        "duration": run.seconds,
        "completed": len(whole),
        "failed": len(run.outcomes) - len(whole),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(whole) / run.seconds,
        "request_goodput": good / run.seconds if bounds else None,
        "output_throughput": num_output / run.seconds,
        "total_token_throughput": (num_input + num_output) / run.seconds,
        "client_cpu_share": run.cpu_share,
    }
    for metric in METRICS:
        found |= _statistics(metric, _milliseconds(metric, whole), percentiles)
    return found


def detail(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Every request's own figures; times are in seconds."""
    return {
        "input_lens": [each.num_prompt for each in outcomes],
        "output_lens": [each.num_output for each in outcomes],
        "ttfts": [each.ttft for each in outcomes],
        "itls": [each.itls for each in outcomes],
        "e2els": [each.e2el for each in outcomes],
        "generated_texts": [each.text for each in outcomes],
        "errors": [each.error for each in outcomes],
    }


def percentile_name(percentile: float) -> str:
    """Such as "p99" or "p99.9"."""
    return f"p{percentile:g}"


def _within(outcome: Outcome, metric: str, most: float) -> bool:
    value = getattr(outcome, metric)
    return value is None or value * 1000 <= most


def _milliseconds(metric: str, outcomes: Sequence[Outcome]) -> list[float]:
    if metric == "itl":
        return [1000 * gap for each in outcomes for gap in each.itls]
    found = [getattr(each, metric) for each in outcomes]
    return [1000 * value for value in found if value is not None]


def _statistics(
    metric: str, times: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float | int | None]:
    """Mean, median, deviation and percentiles; 0 where no request has the time, as in vLLM."""
    values = np.array(times or [0.0])
    found: dict[str, float | int | None] = {
        f"mean_{metric}_ms": float(values.mean()),
        f"median_{metric}_ms": float(np.median(values)),
        f"std_{metric}_ms": float(values.std()),
    }
    for each in percentiles:
        name = f"{percentile_name(each)}_{metric}_ms"
        found[name] = float(np.percentile(values, each))
    return found
