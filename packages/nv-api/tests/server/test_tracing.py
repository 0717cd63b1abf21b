"""Spans of requests, at a collector in this process."""

import builtins
import importlib
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import nv_api.server.tracing
import pytest
from nv_api.server import ServeOptions
from pooling_models import PoolingServer

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # after the skip
    ExportTraceServiceRequest,
)

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(HTTPServer):
    """Keeps the spans that are sent to it."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans, self.resources, self.paths = [], [], []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):  # its name
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") is None:
            for each in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.server.resources.append(values(each.resource))
                self.server.spans += [span for part in each.scope_spans for span in part.spans]
        self.server.paths.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words):
        pass


def values(spanned):
    """The attributes as a dict."""

    def plain(value):
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [plain(each) for each in found.values] if kind == "array_value" else found

    return {each.key: plain(each.value) for each in spanned.attributes}


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_a_request_is_a_span(serve, collector):
    tokens = [ord(letter) - 33 for letter in "QZJK"]
    script = {"num_cached_tokens": 2, "pace": 0.002, "answers": [tokens]}
    served = serve(otlp_endpoint=collector.url, script=script)
    began = time.time()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    messages = [{"role": "user", "content": "xylophone"}]
    body = {"messages": messages, "max_tokens": 3, "top_k": 7, "n": 2}
    answer = served.post("/v1/chat/completions", body, headers=headers).json()
    served.until(lambda: collector.spans)
    (span,) = collector.spans
    found = values(span)
    assert collector.paths == ["/v1/traces"]
    assert collector.resources[0]["service.name"] == "nv"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.name == "chat m/tiny"
    assert (span.kind, span.status.code) == (2, 0)  # a server's, unset
    assert began <= span.start_time_unix_nano / 1e9 <= span.end_time_unix_nano / 1e9 <= time.time()
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.id"] == "mine"
    assert found["gen_ai.request.max_tokens"] == 3
    assert found["gen_ai.request.top_k"] == 7
    assert found["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert found["gen_ai.usage.cache_read.input_tokens"] == 2
    assert found["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert found["gen_ai.latency.e2e"] >= found["gen_ai.latency.time_to_first_token"] > 0
    assert found["gen_ai.latency.time_in_model_decode"] > 0
    assert answer["choices"][0]["message"]["content"] == "QZJ"
    assert not span.events
    for text in "xylophone", "QZJ":
        assert text not in str(span)


def test_a_request_that_fails_or_is_left_is_a_span_with_an_error(serve, collector):
    served = serve(
        otlp_endpoint=f"{collector.url}/of/mine",
        script={"answers": [[65, -1], [65] * 200], "pace": 0.002},
    )
    served.complete("ab", stream=True)
    with served.client.stream(
        "POST", "/v1/completions", json={"prompt": "ab", "stream": True, "max_tokens": 200}
    ) as response:
        next(response.iter_lines())
    served.until(lambda: len(collector.spans) == 2)
    assert set(collector.paths) == {"/of/mine"}
    for span, kind in zip(collector.spans, ("error", "abort"), strict=True):
        assert span.name == "text_completion m/tiny"
        assert span.status.code == 2
        assert values(span)["error.type"] == kind
        assert values(span)["gen_ai.response.finish_reasons"] == [kind]


def test_a_collector_that_never_answers_holds_up_no_request(monkeypatch, serve):
    monkeypatch.setattr("nv_api.server.tracing.CLOSING_SECONDS", 0.05)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "8")
    with socket.create_server(("127.0.0.1", 0)) as collector:
        collector.settimeout(5)
        served = serve(otlp_endpoint=f"http://127.0.0.1:{collector.getsockname()[1]}")
        begun = time.monotonic()
        assert served.complete("ab").status_code == 200
        connection, _ = collector.accept()  # a span is on its way
        with connection:
            assert connection.recv(5).startswith(b"POST ")
            assert served.complete("ab").status_code == 200
            served.until(served.idle)
            assert time.monotonic() - begun < 5


def test_embeddings_are_a_span_too(pooling, collector):
    folder = pooling("embedder")[0].folder
    served = PoolingServer(folder, otlp_endpoint=collector.url)
    try:
        answer = served.post(
            "/v1/embeddings", {"input": ["xylophone", "b"], "dimensions": 3}
        ).json()
        served.until(lambda: collector.spans)
    finally:
        served.close()
    (span,) = collector.spans
    found = values(span)
    assert span.name == "embeddings m/tiny"
    assert span.status.code == 0
    assert found["gen_ai.operation.name"] == "embeddings"
    assert found["gen_ai.embeddings.dimension.count"] == 3
    assert found["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == 0
    assert found["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    assert found["gen_ai.latency.time_in_model_inference"] > 0
    assert "xylophone" not in str(span)


@pytest.mark.parametrize(
    "text",
    ["grpc://x", "http://a:99999", "http://a:0", "http://a:b", "http://[::1", "http://:4318", "a"],
)
def test_a_wrong_endpoint_is_refused(text):
    wanted = f"otlp_endpoint is '{text}': it must be a URL of OTLP"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        ServeOptions(model="m", otlp_endpoint=text)


def test_without_the_extra_only_the_endpoint_is_refused(monkeypatch, serve):
    find = builtins.__import__

    def without(name, *rest):
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError("none", name=name)
        return find(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r'needs opentelemetry.*: pip install "nv-api\[otlp\]"'):
        ServeOptions(model="m", otlp_endpoint="http://localhost:4318")
    importlib.reload(nv_api.server.tracing)
    assert serve().complete("ab").status_code == 200
