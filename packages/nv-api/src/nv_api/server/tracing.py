"""Tracing: an OpenTelemetry span for each request that the engine has accepted.

Owns the attributes, which are OpenTelemetry's for generative AI, and for the times in the engine
vLLM's. Never records a text. OpenTelemetry's SDK and exporter are imported only if an endpoint is
given.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nv_engine import PoolingParams, SamplingParams
from nv_engine.values import shown
from starlette.types import Scope

from nv_api.sentences import extra

if TYPE_CHECKING:
    from nv_api.request import Request
    from nv_api.server.generation import Generation

DEFAULT_PATH = "/v1/traces"
CLOSING_SECONDS = 2.0
"""Longest wait for the collector at the server's end."""
UNFINISHED = (None, "abort", "error")
"""Finish reasons of completions that are not whole."""


def checked_endpoint(text: str) -> str:
    """The URL that spans are sent to; without a path it gets OpenTelemetry's usual one.

    Raises:
        ValueError: not a URL of http or https.
        ImportError: the extra is not installed.
    """
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # brackets of IPv6, or a port past 65,535
        is_url = False
    if not is_url:
        raise ValueError(
            f"otlp_endpoint is {shown(text)}: it must be a URL of OTLP over HTTP, such as "
            "http://localhost:4318/v1/traces"
        )
    with extra("otlp_endpoint", "otlp"):
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401, PLC0415
    return text if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}{DEFAULT_PATH}"


class Tracing:
    """Sends spans to a collector, from a thread of its own.

    OpenTelemetry's environment variables apply (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
    OTEL_EXPORTER_OTLP_HEADERS, …).

    Args:
        endpoint: of `checked_endpoint`.
        model_name: the model's first name.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        service = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "nv")}
        self._provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("nv_api.server")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def close(self) -> None:
        """Send what is left, to a collector that does not take long."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(CLOSING_SECONDS)

    @contextmanager
    def request(
        self,
        scope: Scope,
        operation: str,
        params: Sequence[SamplingParams | PoolingParams],
        generation: "Generation",
        seconds: float,
    ) -> Iterator[None]:
        """Record a request at its end, however it ends.

        Args:
            scope: of ASGI; its headers may name the span that this one is a part of.
            operation: what is done, such as "chat".
            params: of its prompts.
            generation: its prompts in the engine.
            seconds: since it arrived.
        """
        arrived_at = time.time() - seconds
        try:
            yield
        finally:
            self._record(scope, operation, params, generation, arrived_at)

    def _record(
        self,
        scope: Scope,
        operation: str,
        params: Sequence[SamplingParams | PoolingParams],
        generation: "Generation",
        arrived_at: float,
    ) -> None:
        from opentelemetry.trace import SpanKind, StatusCode  # noqa: PLC0415

        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        reasons = [
            completion.finish_reason
            for request in generation.requests
            for completion in request.completions
        ]
        lora = generation.requests[0].prompt.lora
        model_name = self._model_name if lora is None else lora.lora_name
        span = self._tracer.start_span(
            f"{operation} {model_name}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            start_time=int(arrived_at * 1e9),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "nv",
                "gen_ai.response.model": model_name,
                "gen_ai.request.id": scope["state"]["request_id"],
                "gen_ai.response.finish_reasons": [reason or "abort" for reason in reasons],
                **_asked(params[0], model_name),
                **_usage(generation),
                **_times(generation.requests, time.time() - arrived_at),
            },
        )
        if any(reason in UNFINISHED for reason in reasons):
            span.set_attribute("error.type", "error" if "error" in reasons else "abort")
            span.set_status(StatusCode.ERROR)
        span.end()


def _asked(params: SamplingParams | PoolingParams, model_name: str) -> dict[str, Any]:
    """Of the request; fields that have no effect are left out."""
    found: dict[str, Any] = {"gen_ai.request.model": model_name}
    if isinstance(params, PoolingParams):
        found |= {"gen_ai.embeddings.dimension.count": params.dimensions}
    else:
        found |= _sampled(params)
    return {name: value for name, value in found.items() if value is not None}


def _sampled(params: SamplingParams) -> dict[str, Any]:
    """How tokens are drawn."""
    return {
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": params.seed,
    }


def _usage(generation: "Generation") -> dict[str, int]:
    usage = generation.usage()
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        "gen_ai.usage.num_sequences": sum(len(each.completions) for each in generation.requests),
    }


def _times(requests: Sequence["Request"], seconds: float) -> dict[str, float]:
    """Seconds, under vLLM's names; of several prompts, those of the first."""
    times = requests[0].metrics
    found = {"gen_ai.latency.e2e": seconds}
    scheduled, first, last = (
        times.first_scheduled_time,
        times.first_token_time,
        times.finished_time,
    )
    if first is not None:
        found["gen_ai.latency.time_to_first_token"] = first - times.arrival_time
    if scheduled is not None and first is not None:
        found["gen_ai.latency.time_in_queue"] = scheduled - times.arrival_time
        found["gen_ai.latency.time_in_model_prefill"] = first - scheduled
        if last is not None:
            found["gen_ai.latency.time_in_model_decode"] = last - first
            found["gen_ai.latency.time_in_model_inference"] = last - scheduled
    return found
