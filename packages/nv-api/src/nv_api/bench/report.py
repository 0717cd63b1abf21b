"""Report: a run's figures as a table, which looks like vLLM's, and as JSON.

Owns titles and names. Never computes a figure.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from nv_engine import values

from nv_api.bench.figures import detail, percentile_name
from nv_api.bench.load import INFINITY, METRICS, Load
from nv_api.bench.measure import Measured, Target

Figures: TypeAlias = Mapping[str, float | int | None]
"""Of `nv_api.bench.figures.figures`."""

WIDTH = 50
COUNTS = {
    "Successful requests:": "completed",
    "Failed requests:": "failed",
    "Benchmark duration (s):": "duration",
    "Total input tokens:": "total_input_tokens",
    "Total generated tokens:": "total_output_tokens",
    "Request throughput (req/s):": "request_throughput",
    "Request goodput (req/s):": "request_goodput",
    "Output token throughput (tok/s):": "output_throughput",
    "Total token throughput (tok/s):": "total_token_throughput",
}
TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}

BUSY = 0.8
"""Share of a core above which the client's own speed may be what is measured."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The figures of a run that are shown.

    Attributes:
        load: what was sent.
        metrics: those whose times are in the table.
        percentiles: of each time.
        bounds: of the goodput, in milliseconds.

    Raises:
        ValueError: at construction, for an unknown metric.
    """

    load: Load
    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    bounds: Mapping[str, float]

    def __post_init__(self) -> None:
        for metric in self.metrics:
            values.one_of("percentile_metrics entry", metric, METRICS)

    def table(self, found: Figures) -> str:
        """The figures for people."""
        lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
        if self.load.max_concurrency is not None:
            lines.append(_line("Maximum request concurrency:", self.load.max_concurrency))
        lines.append(_line("Request rate configured (RPS):", self.load.request_rate))
        lines += [
            _line(title, value)
            for title, name in COUNTS.items()
            if (value := found[name]) is not None
        ]
        for metric in self.metrics:
            lines.append(f"{TITLES[metric]:-^{WIDTH}}")
            lines += self._times(metric, found)
        return "\n".join([*lines, "=" * WIDTH])

    def fields(
        self, measured: Measured, target: Target, found: Figures, *, is_detailed: bool
    ) -> dict[str, Any]:
        """The figures for programs, after what was measured; "inf" where JSON has no number."""
        load, outcomes = self.load, measured.run.outcomes
        rate = "inf" if load.request_rate == INFINITY else load.request_rate
        plain = {**asdict(load), "request_rate": rate}
        if load.dataset_path is not None:
            plain["dataset_path"] = str(load.dataset_path)
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "base_url": target.base_url,
            "model_id": measured.model.name,
            "tokenizer_id": target.tokenizer or measured.model.root,
            **plain,
            "goodput": dict(self.bounds),
            **found,
            **(detail(outcomes) if is_detailed else {}),
        }

    def file_name(self, measured: Measured) -> str:
        """A name for the file of `fields`."""
        model = measured.model.name.rpartition("/")[2]
        return f"nv-{self.load.request_rate:g}qps-{model}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"

    def warnings(self, measured: Measured) -> list[str]:
        """Sentences about what makes the figures doubtful."""
        run, found = measured.run, []
        errors = [each.error for each in run.outcomes if each.error]
        if errors:
            found.append(f"{len(errors)} of {len(run.outcomes)} requests failed: {errors[0]}")
        if run.cpu_share > BUSY:
            found.append(
                f"this client used {run.cpu_share:.0%} of a core, so it may be slower than the "
                "server: run several at once, each with a part of the rate"
            )
        return found

    def _times(self, metric: str, found: Figures) -> list[str]:
        names = {"Mean": "mean", "Median": "median"}
        names |= {name.upper(): name for name in map(percentile_name, self.percentiles)}
        return [
            _line(f"{title} {metric.upper()} (ms):", found[f"{name}_{metric}_ms"] or 0.0)
            for title, name in names.items()
        ]


def _line(title: str, value: float | int) -> str:
    return f"{title:<40} {value:.2f}" if isinstance(value, float) else f"{title:<40} {value}"
