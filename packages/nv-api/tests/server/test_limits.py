"""Keys, the queue, deadlines, and the end of a server."""

import asyncio
import gc
import signal
import threading
import time

import httpx
import pytest
from nv_api.server.listening import Listening
from nv_api.server.options import ServeOptions, byte_size
from scripted_device import ScriptedDevice


def many(served, number, **fields):
    async def all_at_once():
        async with httpx.AsyncClient(base_url=served.url, timeout=20) as client:
            body = {"prompt": "ab", **fields}
            return await asyncio.gather(
                *(client.post("/v1/completions", json=body) for _ in range(number))
            )

    return asyncio.run(all_at_once())


class Streaming(threading.Thread):
    """A client in a thread: what it got."""

    def __init__(self, served, **fields):
        super().__init__()
        self.served, self.body, self.text = served, {"prompt": "ab", "stream": True, **fields}, ""
        self.start()

    def run(self):
        with httpx.stream(
            "POST", f"{self.served.url}/v1/completions", json=self.body, timeout=20
        ) as response:
            for text in response.iter_text():
                self.text += text


def test_s03_what_does_not_fit_is_refused_at_once(serve):
    served = serve(script={"num_slots": 1, "paused": True}, max_queue=4)
    first = Streaming(served)
    served.until(lambda: served.llm.stats.num_running == 1)
    releaser = threading.Timer(0.5, lambda: setattr(served.llm, "paused", False))
    releaser.start()
    started = time.monotonic()
    answers = many(served, 19)
    refused = [answer for answer in answers if answer.status_code == 429]
    assert sum(answer.status_code == 200 for answer in answers) == 4
    assert len(refused) == 15
    assert max(answer.elapsed.total_seconds() for answer in refused) < 0.45
    assert time.monotonic() - started >= 0.3
    for answer in refused:
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) > 0
    first.join()
    assert many(served, 4, n=1)[0].status_code == 200


def test_s36_every_route_needs_the_key(serve):
    served = serve(api_key=("sesame", "open"))
    routes = [
        ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/tokenize"),
        ("POST", "/detokenize"), ("GET", "/tokenizer_info"), ("GET", "/v1/models"),
        ("GET", "/v1/models/x"), ("GET", "/version"), ("GET", "/load"), ("GET", "/metrics"),
        ("GET", "/openapi.json"), ("POST", "/v1/embeddings"), ("GET", "/nothing"),
    ]  # fmt: skip
    wrong = [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "sesame"},
        {"x-api-key": "Sesame"},
        {"authorization": "Bearer"},
        {"x-api-key": ""},
    ]
    for method, path in routes:
        for headers in wrong:
            response = served.client.request(method, path, headers=headers)
            assert response.status_code == 401, (path, headers)
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.headers["x-request-id"]
            assert "sesame" not in response.text
        assert served.client.request(method, path, headers={"x-api-key": "open"}).status_code != 401
    for path in "/health", "/ready":
        assert served.client.get(path).status_code == 200
    key = {"authorization": "bearer sesame"}
    assert served.client.get("/v1/models", headers=key).status_code == 200
    assert "sesame" not in repr(served.service.options)


def test_pages_of_other_origins_are_let_in_only_on_request(serve):
    origin = {"origin": "https://page.example"}
    asking = {**origin, "access-control-request-method": "POST"}
    closed, opened = serve(), serve(allowed_origins=("https://page.example",), api_key=("k",))
    response = closed.client.get("/health", headers=origin)
    assert "access-control-allow-origin" not in response.headers
    response = opened.client.options("/v1/completions", headers=asking)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://page.example"
    refused = opened.client.get("/v1/models", headers=origin)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.example"


def test_a_request_that_takes_too_long_ends(serve, events):
    served = serve(
        script={"answers": [[5] * 10_000] * 2, "max_model_len": 20_000}, request_timeout=0.3
    )
    served.llm.pace = 0.01
    plain = served.complete(max_tokens=9000)
    assert (plain.status_code, plain.json()["error"]["code"]) == (503, "timeout")
    *_, last = events(served.complete(max_tokens=9000, stream=True).text)
    assert last["error"]["code"] == "timeout"
    served.until(served.idle)
    assert served.llm.aborted == [0, 1]


def test_loading(serve):
    served = serve(script={"loaded": False})
    for response in (
        served.client.get("/health"),
        served.client.get("/ready"),
        served.client.get("/v1/models"),
        served.chat(),
        served.complete(),
        served.post("/tokenize", {"prompt": "a"}),
    ):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "loading"
        assert response.headers["retry-after"]
    assert served.client.get("/version").status_code == 200
    assert served.client.get("/metrics").status_code == 200
    served.llm.loaded = True
    assert served.client.get("/health").status_code == 200
    assert served.chat().status_code == 200


def test_a_model_that_cannot_be_loaded_ends_the_server(serve, capsys):
    served = serve(script={"loaded": False, "refuse": RuntimeError("no\nmemory")})
    served.thread.join(10)
    assert served.server.exit_code == 1
    assert "nv: no memory" in capsys.readouterr().err


def test_s04_a_signal_lets_running_requests_end(serve, events):
    served = serve(script={"pace": 0.01, "answers": [[5] * 50] * 8})
    clients = [Streaming(served, max_tokens=50) for _ in range(8)]
    served.until(lambda: len(served.llm.running) == 8)
    served.call(served.server.handle_exit, signal.SIGTERM, None)
    served.until(lambda: served.client.get("/ready").status_code == 503)
    refused = served.complete()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert served.client.get("/health").status_code == 200
    for client in clients:
        client.join()
        chunks = events(client.text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "&" * 50
    served.thread.join(10)
    assert not served.thread.is_alive()
    assert served.server.exit_code == 0
    assert served.llm.aborted == []


def test_s04_a_signal_while_the_model_loads(serve):
    served = serve(script={"loaded": False})
    served.service.lifecycle.guards.add("a request")  # holds the port open
    served.call(served.server.handle_exit, signal.SIGTERM, None)
    refused = served.complete()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    served.service.lifecycle.guards.clear()
    served.thread.join(10)
    assert served.server.exit_code == 0


def test_s04_a_load_that_is_broken_off_is_no_error_in_the_log(engine_server, caplog, capfd):
    device = LoadingDevice()
    served = engine_server(device, waits=False)
    assert device.is_asked.wait(60)
    served.call(served.server.handle_exit, signal.SIGTERM, None)
    served.until(lambda: served.llm.loss is not None, 20)
    device.may_go.set()
    served.thread.join(20)
    gc.collect()  # a task whose error nothing has read is logged when it is freed
    assert served.server.exit_code == 0
    assert not [record for record in caplog.records if record.exc_info]
    assert "Traceback" not in capfd.readouterr().err


class LoadingDevice(ScriptedDevice):
    """A device that is made once it may be."""

    def __init__(self):
        self.is_asked, self.may_go = threading.Event(), threading.Event()
        super().__init__()

    @property
    def facts(self):
        self.is_asked.set()
        assert self.may_go.wait(60)
        return self._facts

    @facts.setter
    def facts(self, facts):
        self._facts = facts


def test_s04_what_does_not_end_in_time_is_aborted(serve, events):
    served = serve(
        script={"pace": 0.01, "answers": [[5] * 9000], "max_model_len": 10_000}, drain_seconds=0.2
    )
    client = Streaming(served, max_tokens=9000)
    served.until(lambda: served.llm.running)
    served.call(served.server.handle_exit, signal.SIGTERM, None)
    client.join()
    assert events(client.text)[-1]["error"]["code"] == "draining"
    served.thread.join(10)
    assert served.server.exit_code == 0
    assert served.llm.aborted == [0]


def cut_off(served):
    with pytest.raises(httpx.RemoteProtocolError):
        served.complete("a", max_tokens=9000)


def test_s04_a_second_signal_ends_at_once(serve):
    served = serve(script={"pace": 0.01, "answers": [[5] * 9000], "max_model_len": 10_000})
    client = threading.Thread(target=cut_off, args=[served])
    client.start()
    served.until(lambda: served.llm.running)
    started = time.monotonic()
    served.call(served.server.handle_exit, signal.SIGTERM, None)
    served.call(served.server.handle_exit, signal.SIGTERM, None)
    served.thread.join(10)
    client.join()
    assert time.monotonic() - started < 3
    assert served.llm.aborted == [0]


def test_s05_a_lost_engine_is_an_error_of_each_request(serve, events):
    served = serve(script={"pace": 0.01, "answers": [[5] * 9000] * 2, "max_model_len": 10_000})
    client = Streaming(served, max_tokens=9000)
    served.until(lambda: served.llm.running)
    served.call(served.llm.lose, "the host's process ended")
    health = served.client.get("/health")
    refused = served.complete()
    client.join()
    assert events(client.text)[-1]["error"]["code"] == "engine_dead"
    for response in health, refused:
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_dead"
    served.thread.join(10)
    assert served.server.exit_code == 1


def test_an_engine_that_does_not_step_is_not_healthy(serve):
    served = serve(script={"paused": True}, stall_seconds=0.4)
    time.sleep(0.6)
    assert served.client.get("/health").status_code == 200, "it has no work"
    client = Streaming(served)
    served.until(lambda: served.client.get("/health").status_code == 503)
    assert served.client.get("/ready").json()["error"]["code"] == "engine_stalled"
    served.llm.paused = False
    client.join()
    served.until(lambda: served.client.get("/health").status_code == 200)


def test_metrics(serve):
    served = serve(script={"pace": 0.002})
    served.complete(["ab", "cd"], n=2, max_tokens=2)
    served.chat("ab", max_tokens=5, stream=True)
    served.client.get("/v1/models")
    served.client.get("/secret/path")
    text = served.client.get("/metrics").text
    labels = 'engine="0",model_name="m/tiny"'
    for line in (
        f"vllm:num_requests_running{{{labels}}} 0.0",
        f"vllm:num_requests_waiting{{{labels}}} 0.0",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.0",
        f"vllm:request_params_n_count{{{labels}}} 3.0",
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 3.0",
        f"vllm:e2e_request_latency_seconds_count{{{labels}}} 3.0",
        f"vllm:request_generation_tokens_sum{{{labels}}} 13.0",
        f'vllm:request_success_total{{engine="0",finished_reason="length",{labels[11:]}}} 3.0',
        'nv:http_requests_total{code="200",route="/v1/completions"} 1.0',
        'nv:http_requests_total{code="404",route="other"} 1.0',
    ):
        assert line in text.splitlines(), line
    assert "secret" not in text
    for name in (
        "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
        "prompt_tokens_total", "generation_tokens_total", "iteration_tokens_total_bucket",
        "inter_token_latency_seconds_bucket", "request_queue_time_seconds_bucket",
        "request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket",
        "request_inference_time_seconds_bucket", "request_time_per_output_token_seconds_bucket",
        "request_prompt_tokens_bucket", "request_params_max_tokens_bucket",
    ):  # fmt: skip
        assert f"vllm:{name}{{" in text, name
    assert 'le="0.00025"' in text
    assert "nv:event_loop_lag_seconds " in text


def test_openapi_names_every_route(serve):
    served = serve()
    schema = served.client.get("/openapi.json").json()
    assert {
        "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/tokenizer_info",
        "/v1/models", "/v1/models/{name}", "/health", "/ready", "/version", "/load", "/metrics",
        "/", "/page/defaults",
        "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/responses", "/v1/messages",
        "/v1/messages/count_tokens", "/classify", "/pooling",
        "/score", "/rerank", "/v2/rerank", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    } == schema["paths"].keys()  # fmt: skip
    embeddings, score = (
        schema["components"]["schemas"][name] for name in ("EmbeddingsRequest", "ScoreRequest")
    )
    assert embeddings["oneOf"] == [{"required": ["input"]}, {"required": ["messages"]}]
    assert {"required": ["queries", "documents"]} in score["oneOf"]
    for path in "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages":
        stream = schema["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
        assert stream["itemSchema"]["required"] == ["data"]  # a `schema` would describe one event
        assert "schema" not in stream
    text = str(schema)
    for name in text.split("'#/components/schemas/")[1:]:
        assert name.split("'")[0] in schema["components"]["schemas"]


def test_requests_are_logged_only_if_that_is_asked_for(serve, caplog):
    caplog.set_level("INFO", "nv")
    quiet = serve()
    quiet.complete("xyzzy")
    quiet.until(quiet.idle)
    assert "xyzzy" not in caplog.text
    assert "prompt tokens" not in caplog.text
    served = serve(log_requests="ids")
    served.complete("xyzzy")
    served.until(lambda: "5 prompt tokens" in caplog.text)  # written after the response
    assert "xyzzy" not in caplog.text
    served = serve(log_requests="text")
    served.complete("xyzzy")
    served.until(lambda: "xyzzy" in caplog.text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_queue", 0), ("max_n", 1.5), ("max_logprobs", -1), ("request_timeout", 0),
        ("write_timeout", -1), ("drain_seconds", -1), ("log_requests", "all"),
        ("generation_config", "vllm"), ("api_key", ("",)), ("served_model_name", "a"),
        ("max_grammar_depth", 101), ("ping_interval", 0),
        ("override_generation_config", {"top_p": 2}), ("override_generation_config", {"topp": 1}),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named(name, value):
    with pytest.raises(ValueError, match=name):
        ServeOptions(model="m", **{name: value})


def test_keys_are_in_no_error():
    with pytest.raises(ValueError, match="api_key") as raised:
        ServeOptions(model="m", api_key=("sesame", ""))
    assert "sesame" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", 70000), ("root_path", "a"), ("ssl_keyfile", "a"), ("keep_alive", -1)],
)
def test_a_wrong_place_is_named(name, value):
    with pytest.raises(ValueError, match=name):
        Listening(**{name: value})


@pytest.mark.parametrize(
    ("text", "size"),
    [("5", 5), ("64k", 65536), ("32M", 32 << 20), ("1GiB", 1 << 30), ("2MB", 2 << 20)],
)
def test_sizes(text, size):
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5M", "5T"])
def test_wrong_sizes(text):
    with pytest.raises(ValueError, match="a size is"):
        byte_size(text)
