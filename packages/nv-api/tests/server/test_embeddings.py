"""POST /v1/embeddings, over a real socket and a tiny model: the values are those of `LLM.embed`."""

import asyncio
import base64
import socket
import struct

import httpx
import numpy as np
import pytest
from nv_api import PoolingParams
from nv_api.server.protocol.embeddings import EmbeddingsResponse
from nv_api.server.protocol.errors import ErrorEnvelope
from pooling_models import EOS, MAX_LEN, WIDTH
from test_departures import request_bytes, reset

PATH = "/v1/embeddings"
TEXTS = ["hello world", "a", "the sea is wide and deep", "STOP hello hello", "é日本"]
MESSAGES = [{"role": "user", "content": "ab"}]


@pytest.fixture(scope="module")
def served(pooling):
    return pooling("embedder")[0]


@pytest.fixture(scope="module")
def llm(pooling):
    return pooling("embedder")[1]


@pytest.fixture
def embed(served):
    def of(given, **fields):
        response = served.post(PATH, {"input": given, **fields})
        assert response.status_code == 200, response.text
        EmbeddingsResponse.model_validate(response.json())
        return response.json()

    return of


def vectors(answer):
    return [each["embedding"] for each in answer["data"]]


def close(found, want):
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-6)


def truth(llm, texts, params=None, **more):
    outputs = llm.embed(texts, params, use_tqdm=False, **more)
    return [each.outputs.embedding for each in outputs], outputs


def test_a_response_has_openai_s_shape(served, embed, llm):
    want, outputs = truth(llm, TEXTS)
    answer = embed(TEXTS, model="m/tiny", user="me")
    close(vectors(answer), want)
    assert answer["object"] == "list"
    assert answer["model"] == "m/tiny"
    assert [each["index"] for each in answer["data"]] == list(range(len(TEXTS)))
    assert {each["object"] for each in answer["data"]} == {"embedding"}
    num_tokens = sum(len(each.prompt_token_ids) for each in outputs)
    cached = answer["usage"].pop("prompt_tokens_details")["cached_tokens"]
    assert 0 <= cached < num_tokens
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    response = served.post(PATH, {"input": "a"}, headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["id"] == "embd-mine"
    assert "x-ignored-fields" not in response.headers


@pytest.mark.parametrize("given", ["hello", [5, 6, 7], ["hello", "a"], [[5, 6], [7]]])
def test_the_four_forms_of_an_input(embed, llm, given):
    close(vectors(embed(given)), truth(llm, given)[0])


def test_base64_is_the_same_numbers(embed):
    for dimensions in None, 3:
        numbers = vectors(embed(TEXTS, dimensions=dimensions, encoding_format="float"))
        for text, row in zip(
            vectors(embed(TEXTS, dimensions=dimensions, encoding_format="base64")),
            numbers,
            strict=True,
        ):
            assert [*struct.unpack(f"<{len(row)}f", base64.b64decode(text))] == row


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"dimensions": 8}, PoolingParams(dimensions=8)),
        ({"dimensions": WIDTH}, None),
        ({"normalize": False}, PoolingParams(use_activation=False)),
        ({"use_activation": False, "dimensions": 5},
         PoolingParams(use_activation=False, dimensions=5)),
        ({"truncate_prompt_tokens": 3}, PoolingParams(truncate_prompt_tokens=3)),
        ({"priority": 0, "truncation_side": "left", "encoding_format": None}, None),
    ],
)  # fmt: skip
def test_parameters(embed, llm, fields, params):
    want = truth(llm, TEXTS, params)[0]
    close(vectors(embed(TEXTS, **fields)), want)
    if params is not None:
        assert np.abs(np.array(want) - np.resize(truth(llm, TEXTS)[0], np.shape(want))).max() > 0.01


def test_special_tokens_and_prompts_of_the_model(embed, llm, byte_level):
    ids = byte_level("sea")["input_ids"]
    answer = embed("sea", add_special_tokens=False)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    close(vectors(answer), truth(llm, [ids])[0])
    close(vectors(embed("sea")), truth(llm, [[*ids, EOS]])[0])
    close(vectors(embed("sea", prompt_name="query")), truth(llm, "sea", prompt_name="query")[0])


def test_a_conversation_is_rendered(embed, served, llm, byte_level):
    text = byte_level.apply_chat_template(MESSAGES, tokenize=False)
    for fields, end in (({}, []), ({"add_special_tokens": True}, [EOS])):
        response = served.post(PATH, {"messages": MESSAGES, **fields})
        ids = [*byte_level(text, add_special_tokens=False)["input_ids"], *end]
        close(vectors(response.json()), truth(llm, [ids])[0])
    opened = {"add_generation_prompt": True, "chat_template_kwargs": {"enable_thinking": False}}
    response = served.post(PATH, {"messages": MESSAGES, **opened})
    ids = byte_level.apply_chat_template(
        MESSAGES, add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    close(vectors(response.json()), truth(llm, [ids])[0])


def test_a_prompt_may_fill_the_context_and_is_cut_only_if_that_is_asked_for(served, embed, llm):
    full = [5 + i % 90 for i in range(MAX_LEN)]
    close(vectors(embed(full)), truth(llm, [full])[0])
    close(vectors(embed([9, *full], truncate_prompt_tokens=-1)), truth(llm, [full])[0])
    error = served.post(PATH, {"input": [[9], [9, *full]]}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "input.1"
    assert f"has {MAX_LEN + 1} tokens" in error["message"]
    assert f"is {MAX_LEN} tokens" in error["message"]


def test_prompts_with_one_salt_share_cached_blocks(embed):
    prompt = [7] * 40
    cached = [
        embed(prompt, cache_salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ("a", "a", "b")
    ]
    assert cached == [0, 32, 0]


WRONG = [
    ("input", None), ("input", ""), ("input", []), ("input", [""]), ("input", [[]]),
    ("input", 5), ("input", {"a": 1}), ("input", ["a", 5]), ("input", ["a", None]),
    ("input", [[5], "a", [None]]), ("input", [1.5]), ("input", [True]), ("input", [-1]),
    ("input", [[5], [320]]), ("input", [2**70]), ("input", "a" * 100), ("input", "a\0b"),
    ("dimensions", 0), ("dimensions", WIDTH + 1), ("dimensions", "8"), ("dimensions", 1.5),
    ("dimensions", True), ("encoding_format", "hex"), ("encoding_format", "bytes"),
    ("embed_dtype", "float16"), ("endianness", "big"), ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", MAX_LEN + 1),
    ("truncate_prompt_tokens", "1"), ("normalize", 1), ("use_activation", "yes"),
    ("add_special_tokens", 0), ("priority", 3), ("truncation_side", "right"),
    ("padding", "max_length"), ("mm_processor_kwargs", {"a": 1}), ("prompt_name", "x"),
    ("prompt_name", 5), ("cache_salt", ""), ("cache_salt", 5), ("model", 5), ("user", 5),
    ("messages", []), ("messages", "a"), ("messages", [{"content": "a"}]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_field_is_named_and_nothing_is_run(served, name, value):
    before = served.work
    body = {name: value} if name == "messages" else {"input": "ab", name: value}
    response = served.post(PATH, body)
    assert response.status_code == 400, response.text
    ErrorEnvelope.model_validate(response.json())
    error = response.json()["error"]
    assert error["param"].split(".")[0] == name, error
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in error["message"]
    assert served.work == before
    assert served.service.admission.num_in_flight == served.llm.num_unfinished == 0


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "needs one of input and messages"),
        ({"input": "a", "messages": MESSAGES}, "input", "needs one of input and messages"),
        ({"input": [5], "prompt_name": "query"}, "prompt_name", "token ids"),
        ({"input": "a", "normalize": True, "use_activation": False}, "normalize", "one field"),
        ({"messages": MESSAGES, "chat_template": "x"}, "chat_template", "--chat-template"),
        ({"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message", "add_generation_prompt"),
        ({"input": ["a"] * 1025}, None, "1025 sequences"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit_together(served, body, param, words):
    before = served.work
    response = served.post(PATH, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]
    assert served.work == before


def test_a_model_without_that_name_and_an_unknown_field(served):
    error = served.post(PATH, {"input": "a", "model": "x"})
    assert error.status_code == 404
    assert error.json()["error"]["code"] == "model_not_found"
    response = served.post(PATH, {"input": "a", "input_type": "query"})
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "input_type"


def test_many_clients_at_once_get_their_own(served, llm):
    lists = [[f"text {i} {j}" for j in range(1 + i % 5)] for i in range(24)]

    async def main():
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            return await asyncio.gather(
                *(client.post(PATH, json={"input": texts}) for texts in lists)
            )

    for texts, response in zip(lists, asyncio.run(main()), strict=True):
        answer = response.json()
        assert [each["index"] for each in answer["data"]] == list(range(len(texts)))
        close(vectors(answer), truth(llm, texts)[0])


def test_a_client_that_leaves_is_aborted(served):
    with served.paused():
        end = socket.create_connection(("127.0.0.1", served.port))
        end.sendall(request_bytes(PATH, {"input": [[5, 6, 7]] * 20}))
        served.until(lambda: served.host.engine.metrics.num_waiting == 20)
        reset(end)
        served.until(lambda: served.host.engine.metrics.num_waiting == 0)
        served.until(lambda: served.service.admission.num_in_flight == 0)
    assert served.llm.num_unfinished == 0
    served.until(served.is_idle)


def test_a_full_queue_is_429(served, monkeypatch):
    admission = served.service.admission
    monkeypatch.setattr(admission, "_max_queue", 4)
    monkeypatch.setattr(admission, "_num_slots", lambda: 0)
    assert served.post(PATH, {"input": ["a"] * 4}).status_code == 200
    with served.paused():
        first = socket.create_connection(("127.0.0.1", served.port))
        first.sendall(request_bytes(PATH, {"input": ["ab"] * 4}))
        served.until(lambda: admission.num_in_flight == 4)
        response = served.post(PATH, {"input": "a"})
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "queue_full"
        assert response.headers["retry-after"]
        reset(first)
        served.until(lambda: admission.num_in_flight == 0)
    served.until(served.is_idle)


def test_a_body_that_is_too_large_and_a_request_that_takes_too_long(served, monkeypatch):
    options = vars(served.service.options)  # they are frozen
    before = served.work
    monkeypatch.setitem(options, "max_body_bytes", 20)
    response = served.post(PATH, {"input": "a" * 30})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    monkeypatch.setitem(options, "request_timeout", 0.1)
    with served.paused():
        response = served.post(PATH, {"input": "ab"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "timeout")
        assert "within 0.1 s" in response.json()["error"]["message"]
        served.until(lambda: served.host.engine.metrics.num_waiting == 0)
    assert served.work == (before[0] + 1, before[1])
    served.until(served.is_idle)


def test_metrics_count_them(served, embed):
    def value(name):
        (line,) = [
            line for line in served.client.get("/metrics").text.splitlines()
            if line.startswith(name)
        ]  # fmt: skip
        return float(line.split()[-1])

    names = (
        "vllm:prompt_tokens_total", "vllm:e2e_request_latency_seconds_count",
        "vllm:time_to_first_token_seconds_count", "vllm:request_queue_time_seconds_count",
        "vllm:request_inference_time_seconds_count", "vllm:request_prompt_tokens_count",
    )  # fmt: skip
    before = [value(name) for name in names]
    num_tokens = embed(["ab", "cde"])["usage"]["prompt_tokens"]
    served.until(served.is_idle)
    grown = [value(name) - old for name, old in zip(names, before, strict=True)]
    assert grown == [num_tokens, 2, 2, 2, 2, 2]
    assert value('nv:http_requests_total{code="200",route="/v1/embeddings"}') > 0


def test_routes_of_text_are_refused_and_the_model_is_listed(served):
    before = served.work
    bodies = {
        "/v1/chat/completions": {"messages": MESSAGES},
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    }
    for path, body in bodies.items():
        response = served.post(path, body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert "pools (embed, token_embed) and generates no text: use /v1/embeddings" in str(error)
        if path != "/v1/messages":
            assert error["code"] == "unsupported"
    assert served.work == before
    (card,) = served.client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("m/tiny", MAX_LEN)
    assert served.client.get("/health").status_code == 200
    assert served.post("/tokenize", {"prompt": "a"}).json()["tokens"][-1] == EOS
