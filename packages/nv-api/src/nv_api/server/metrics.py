"""Metrics: what /metrics shows, with vLLM's names.

Owns the server's counters and histograms; the engine's come from its newest record. No label comes
from a request, but for the names of adapters that one may have loaded.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from nv_api.outputs import CompletionOutput, RequestMetrics
from nv_api.server.llm import ServedLLM

if TYPE_CHECKING:
    from nv_api.request import Request

LABELS = ("model_name", "engine")
COUNTS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
"""Upper bounds of histograms of tokens."""
NUMBERS = (1, 2, 5, 10, 20, 50, 100)
FIRST_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
"""In seconds, as the following."""
PER_TOKEN = (
    *(0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
WHOLE = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """Numbers of values up to each of some bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str, labels: Sequence[str]) -> Metric:
        """The histogram as /metrics shows it: each bucket has those below it too."""
        metric = HistogramMetricFamily(name, text, labels=LABELS)
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((str(bound), total))
        metric.add_metric(labels, buckets, self._sum)
        return metric


class Metrics:
    """The counters of one server.

    Args:
        llm: the model, whose counters are shown too.
        model_name: the model's first name.
    """

    def __init__(self, llm: ServedLLM, model_name: str) -> None:
        self._llm = llm
        self._labels = (model_name, "0")
        self.responses: Counter[tuple[str, int]] = Counter()
        """By route and status."""
        self.endings: Counter[str] = Counter()
        """Completions by finish reason."""
        self.num_prompt_tokens = 0
        self.loop_lag = 0.0
        """Seconds that the event loop was late, the last time."""
        self.prompt_tokens = Histogram(COUNTS)
        self.generation_tokens = Histogram(COUNTS)
        self.params_n = Histogram(NUMBERS)
        self.params_max_tokens = Histogram(COUNTS)
        self.first_token = Histogram(FIRST_TOKEN)
        self.inter_token = Histogram(PER_TOKEN)
        self.per_token = Histogram(PER_TOKEN)
        self.whole = Histogram(WHOLE)
        self.queued = Histogram(WHOLE)
        self.prefill = Histogram(WHOLE)
        self.decode = Histogram(WHOLE)
        self.inference = Histogram(WHOLE)
        self.iteration_tokens = Histogram(COUNTS)
        self.with_adapters: dict[int, Sequence[Request]] = {}
        """Requests in flight that have an adapter, by a number for each HTTP request."""
        llm.on_step = self._note_step
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Shown(self.families))

    def text(self) -> bytes:
        """The page /metrics."""
        return generate_latest(self._registry)

    def _note_step(self, step: Any) -> None:  # noqa: ANN401  # of `ServedLLM.on_step`
        if num_tokens := step.num_prefill_tokens + step.num_decode_tokens:
            self.iteration_tokens.observe(num_tokens)

    def families(self) -> Iterator[Metric]:
        """Everything that is shown."""
        yield from self._of_the_engine()
        yield from self._of_requests()
        yield from self._of_adapters()
        yield GaugeMetricFamily(
            "nv:event_loop_lag_seconds", "Lateness of the event loop.", value=self.loop_lag
        )
        responses = CounterMetricFamily(
            "nv:http_requests", "Responses by route and status.", labels=("route", "code")
        )
        for (route, code), count in sorted(self.responses.items()):
            responses.add_metric((route, str(code)), count)
        yield responses

    def _of_the_engine(self) -> Iterator[Metric]:
        stats = self._llm.stats
        used = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
        yield self._gauge("num_requests_running", "Sequences that run.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Used share of the KV cache; 1 is all.", used)
        for name, text, count in (
            ("prefix_cache_queries", "Tokens looked up in the cache.", stats.cache_query_tokens),
            ("prefix_cache_hits", "Tokens found there.", stats.cache_hit_tokens),
            ("num_preemptions", "Sequences that gave their blocks up.", stats.num_preemptions),
            ("generation_tokens", "Tokens generated.", stats.num_generated_tokens),
            ("prompt_tokens", "Tokens of prompts that were read.", self.num_prompt_tokens),
        ):
            yield self._counter(name, text, count)

    def _of_adapters(self) -> Iterator[Metric]:
        """The adapters of requests in flight, in labels as vLLM has them; the value is the time."""
        facts = self._llm.facts.adapters if self._llm.is_ready else None
        if facts is None:
            return
        running: set[str] = set()
        waiting: set[str] = set()
        for request in chain.from_iterable(self.with_adapters.values()):
            if request.prompt.lora is not None and not request.finished:
                is_waiting = request.metrics.first_scheduled_time is None
                (waiting if is_waiting else running).add(request.prompt.lora.lora_name)
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and of waiting requests.",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        names = [",".join(sorted(each)) for each in (running, waiting)]
        info.add_metric((str(facts.num_slots), *names), time.time())
        yield info

    def _of_requests(self) -> Iterator[Metric]:
        endings = CounterMetricFamily(
            "vllm:request_success", "Completions by reason.", labels=(*LABELS, "finished_reason")
        )
        for reason in ("stop", "length", "abort", "error"):
            endings.add_metric((*self._labels, reason), self.endings[reason])
        yield endings
        for name, text, histogram in (
            ("iteration_tokens_total", "Tokens of a step.", self.iteration_tokens),
            ("request_prompt_tokens", "Tokens of a prompt.", self.prompt_tokens),
            ("request_generation_tokens", "Tokens of a completion.", self.generation_tokens),
            ("request_params_n", "Completions of a prompt.", self.params_n),
            ("request_params_max_tokens", "max_tokens.", self.params_max_tokens),
            ("time_to_first_token_seconds", "Arrival to first token.", self.first_token),
            ("inter_token_latency_seconds", "Between two events.", self.inter_token),
            ("request_time_per_output_token_seconds", "Per token of a request.", self.per_token),
            ("e2e_request_latency_seconds", "Arrival to end.", self.whole),
            ("request_queue_time_seconds", "Arrival to first step.", self.queued),
            ("request_prefill_time_seconds", "First step to first token.", self.prefill),
            ("request_decode_time_seconds", "First token to end.", self.decode),
            ("request_inference_time_seconds", "First step to end.", self.inference),
        ):
            yield histogram.family(f"vllm:{name}", text, self._labels)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        metric = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        metric.add_metric(self._labels, value)
        return metric

    def _counter(self, name: str, text: str, value: float) -> Metric:
        metric = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        metric.add_metric(self._labels, value)
        return metric


class _Shown(Collector):
    """Hands out what a function makes."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Everything."""
        return self._families()


class Timing:
    """The times of one prompt's request, for the histograms.

    Args:
        metrics: where they are counted.
        arrived_at: when the HTTP request came, by the event loop's clock.
        prompt_len: tokens of the prompt.
        num_completions: n.
    """

    def __init__(
        self, metrics: Metrics, arrived_at: float, prompt_len: int, num_completions: int
    ) -> None:
        self._metrics = metrics
        self._arrived_at = arrived_at
        self._prompt_len = prompt_len
        self._num_tokens = [0] * num_completions
        self._first_at: float | None = None
        self._last_at = arrived_at

    @property
    def num_tokens(self) -> int:
        """Generated so far, of all completions."""
        return sum(self._num_tokens)

    def note(self, deltas: Sequence[CompletionOutput], now: float) -> None:
        """Count what has come."""
        metrics = self._metrics
        if self._first_at is None:
            self._first_at = now
            metrics.num_prompt_tokens += self._prompt_len
            metrics.first_token.observe(now - self._arrived_at)
        else:
            metrics.inter_token.observe(now - self._last_at)
        self._last_at = now
        for delta in deltas:
            self._num_tokens[delta.index] += len(delta.token_ids)
            if delta.finish_reason is not None:
                metrics.endings[delta.finish_reason] += 1
                metrics.generation_tokens.observe(self._num_tokens[delta.index])

    def end(self, max_tokens: int | None, times: RequestMetrics) -> None:
        """Count the request as a whole."""
        metrics = self._metrics
        metrics.prompt_tokens.observe(self._prompt_len)
        metrics.params_n.observe(len(self._num_tokens))
        if max_tokens is not None:
            metrics.params_max_tokens.observe(max_tokens)
        metrics.whole.observe(self._last_at - self._arrived_at)
        longest = max(self._num_tokens)
        if self._first_at is not None and longest > 1:
            metrics.per_token.observe((self._last_at - self._first_at) / (longest - 1))
        scheduled, first, last = (
            times.first_scheduled_time,
            times.first_token_time,
            times.finished_time,
        )
        if scheduled is not None and first is not None and last is not None:
            metrics.queued.observe(scheduled - times.arrival_time)
            metrics.prefill.observe(first - scheduled)
            metrics.decode.observe(last - first)
            metrics.inference.observe(last - scheduled)
