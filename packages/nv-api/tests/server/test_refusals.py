"""Requests that are wrong: refused at once, with the name of the field, unseen by the engine."""

import json

import pytest
from nv_api.server.body import LONG_BYTES
from nv_api.server.protocol.errors import ErrorEnvelope
from nv_engine.values import shown

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "a"}]
DEEP = json.loads("[" * 90 + "]" * 90)


@pytest.fixture(autouse=True)
def nothing_reaches_the_engine(request, served):
    before = len(served.llm.submitted)
    yield
    if "unseen" in request.keywords or "refused" in request.node.name:
        assert len(served.llm.submitted) == before
        assert served.service.admission.num_in_flight == 0


def refusal(response, status=400):
    assert response.status_code == status, response.text
    body = response.json()
    ErrorEnvelope.model_validate(body)
    assert response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    assert body["error"]["message"]
    return body["error"]


WRONG = [
    ("temperature", "hot"),
    ("temperature", -1),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", [1]),
    ("top_k", -2),
    ("min_p", 1.5),
    ("presence_penalty", 3),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("seed", "1"),
    ("seed", 2**70),
    ("n", 0),
    ("n", 1.5),
    ("n", 129),
    ("n", 10**6),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("min_tokens", 10**6),
    ("stop", 5),
    ("stop", [""]),
    ("stop", ["a"] * 1000),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "a"),
    ("ignore_eos", "yes"),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("logit_bias", {"AI": 1}),
    ("logit_bias", {"1": "a"}),
    ("logit_bias", [1]),
    ("allowed_token_ids", []),
    ("bad_words", ["a"] * 10**5),
    ("bad_words", [""]),
    ("structured_outputs", {"regex": 5}),
    ("structured_outputs", {"json": {}, "regex": "a"}),
    ("structured_outputs", {"jsonn": {}}),
    ("structured_outputs", {"grammar": "x" * 70000}),
    ("structured_outputs", {"json": {"a": DEEP}}),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": 5}}),
    ("stream", "yes"),
    ("stream_options", {"include_usage": 3}),
    ("stream_options", {"include_usage": True}),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "strict": "no"}},
    ),
    ("cache_salt", 5),
    ("truncate_prompt_tokens", 5),
    ("use_beam_search", True),
    ("model", 5),
]
OF_CHAT = [
    ("messages", []),
    ("messages", "hi"),
    ("messages", [5]),
    ("messages", [{"content": "a"}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": None}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]),
    ("messages", [{"role": "user", "content": "a\0b"}]),
    ("max_completion_tokens", 0),
    ("logprobs", 3),
    ("top_logprobs", 2),
    ("tools", "a"),
    ("tool_choice", "often"),
    ("tool_choice", "required"),
    ("chat_template", "{{ 1 }}"),
    ("chat_template_kwargs", [1]),
    ("chat_template_kwargs", {"tokenize": True}),
    ("reasoning_effort", 3),
    ("reasoning_effort", "lots"),
    ("verbosity", 1),
    ("verbosity", "loud"),
    ("tools", [{"type": "function", "function": {"name": "f", "strict": "yes"}}]),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "a"}),
    ("web_search_options", {}),
    ("functions", [{"name": "f"}]),
    ("continue_final_message", 1),
]
OF_COMPLETIONS = [
    ("prompt", ""),
    ("prompt", []),
    ("prompt", None),
    ("prompt", {"a": 1}),
    ("prompt", ["a", 5]),
    ("prompt", [["a"]]),
    ("prompt", [[], [1]]),
    ("prompt", [1.5]),
    ("logprobs", True),
    ("logprobs", -1),
    ("logprobs", 21),
    ("max_tokens", 0),
    ("suffix", "x"),
    ("best_of", 2),
]


@pytest.mark.parametrize(("field", "value"), WRONG + OF_CHAT, ids=lambda v: str(v)[:40])
def test_s07_a_wrong_field_of_a_chat_is_refused_and_named(served, field, value):
    error = refusal(served.post(CHAT, {"messages": MESSAGES, field: value}))
    assert error["type"] == "invalid_request_error"
    assert field in f"{error['param']} {error['message']}", error
    assert len(error["message"]) < 1000


def test_unknown_words_are_refused_with_those_that_are_known(served):
    error = refusal(served.post(CHAT, {"messages": MESSAGES, "reasoning_effort": "lots"}))
    assert error["param"] == "reasoning_effort"
    assert error["message"].startswith("reasoning_effort is 'lots': it must be 'none', 'minimal'")
    error = refusal(served.post(CHAT, {"messages": MESSAGES, "verbosity": "loud"}))
    assert error["message"] == "verbosity is 'loud': it must be 'low', 'medium' or 'high'"


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_known_words_are_taken(served, effort):
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    fields = {"reasoning_effort": effort, "verbosity": "low", "tools": tools}
    assert served.post(CHAT, {"messages": MESSAGES, **fields}).status_code == 200


@pytest.mark.parametrize("number", [2**64, 10**22 + 1, -(2**70) - 1, 10**300 + 1])
def test_a_refused_integer_is_shown_as_it_was_sent(served, number):
    error = refusal(served.post(TEXT, {"prompt": "ab", "seed": number}))
    assert error["message"].startswith(f"seed is {shown(number)}: ")
    error = refusal(served.post(TEXT, {"prompt": [5, number]}))
    assert str(number)[:100] in error["message"]


def test_an_integer_that_is_no_double_is_refused(served):
    content = b'{"prompt": "ab", "seed": ' + b"1" * 5000 + b"}"
    headers = {"content-type": "application/json"}
    response = served.client.post(TEXT, content=content, headers=headers)
    assert refusal(response)["code"] == "invalid_json"


def test_a_large_integer_inside_a_schema_is_no_fault_of_the_server(served):
    schema = {"type": "object", "properties": {"a": {"maximum": 10**30}}}
    tool = {"type": "function", "name": "f", "parameters": schema}
    response = served.post("/v1/responses", {"input": "ab", "tools": [tool]})
    assert response.status_code == 200
    assert response.json()["tools"][0]["parameters"]["properties"]["a"]["maximum"] == 1e30


@pytest.mark.parametrize(("field", "value"), WRONG + OF_COMPLETIONS, ids=lambda v: str(v)[:40])
def test_s07_a_wrong_field_of_completions_is_refused_and_named(served, field, value):
    error = refusal(served.post(TEXT, {"prompt": "ab", field: value}))
    assert field in f"{error['param']} {error['message']}", error


def test_s07_param_is_the_field(served):
    for field, value in ("temperature", "hot"), ("top_p", 0), ("n", 0), ("logit_bias", {"AI": 1}):
        assert refusal(served.chat(**{field: value}))["param"] == field
    assert refusal(served.post(CHAT, {}))["param"] == "messages"
    assert refusal(served.post(TEXT, {}))["param"] == "prompt"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nul", b"[]", b'"a"', b"\0", b'{"messages": [\0]}', b'{"a": NaN}', b"\xff"],
)
def test_s07_a_body_that_is_not_a_json_object_is_refused(served, body):
    for path in CHAT, TEXT, "/tokenize", "/detokenize":
        response = served.client.post(
            path, content=body, headers={"content-type": "application/json"}
        )
        assert refusal(response)["code"] == "invalid_json"


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_s07_a_deep_body_is_refused(served, opening):
    closing = "]" if opening == "[" else "}"
    for depth in 200, 900, 5000:
        inner = opening * depth + ("1" if opening != "[" else "") + closing * depth
        body = f'{{"messages": [{{"role": "user", "content": "a"}}], "tools": {inner}}}'
        response = served.client.post(
            CHAT, content=body, headers={"content-type": "application/json"}
        )
        assert refusal(response)["code"] == "invalid_json"


def test_a_long_body_is_refused_as_a_short_one(served):
    """It is read in a thread, where errors come from too."""
    long = [[7] * 300 for _ in range(300)]
    assert len(json.dumps(long)) > LONG_BYTES
    assert refusal(served.post(TEXT, {"prompt": [*long, 5]}))["param"] == "prompt"
    assert refusal(served.post(TEXT, {"prompt": long, "n": 0}))["param"] == "n"
    deep = b'{"prompt": "' + b"a" * LONG_BYTES + b'", "x": ' + b"[" * 200 + b"]" * 200 + b"}"
    headers = {"content-type": "application/json"}
    response = served.client.post(TEXT, content=deep, headers=headers)
    assert refusal(response)["code"] == "invalid_json"


def test_s07_the_content_type_is_json(served):
    for headers in {"content-type": "text/plain"}, {}, {"content-type": "application/x-www-form"}:
        response = served.client.post(CHAT, content=b"{}", headers=headers)
        assert refusal(response, 415)["type"] == "invalid_request_error"
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    refusal(served.client.post(CHAT, content=b"{}", headers=headers), 415)
    headers = {"content-type": "application/json; charset=utf-8"}
    assert refusal(served.client.post(CHAT, content=b"{}", headers=headers))["param"] == "messages"


def test_s32_a_large_body_is_refused_before_it_is_read(serve):
    served = serve(max_body_bytes=10_000)
    text = "a" * 40_000
    assert refusal(served.chat(text), 413)["code"] == "body_too_large"

    def parts():
        yield b'{"messages": "'
        for _ in range(100):
            yield b"a" * 1000

    response = served.client.post(
        CHAT, content=parts(), headers={"content-type": "application/json"}
    )
    refusal(response, 413)
    assert served.chat("ab").status_code == 200
    assert len(served.llm.submitted) == 1


def test_s32_more_sequences_than_may_wait_are_refused(serve):
    served = serve(max_queue=4)
    assert "at most 4" in refusal(served.complete(["a"] * 3, n=2))["message"]


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(served):
    for response in served.chat("a" * 600), served.complete("a" * 600), served.complete([1] * 512):
        error = refusal(response)
        assert error["code"] == "context_length_exceeded"
        for words in "prompt is too long", "this model's maximum context length is 512 tokens":
            assert words in error["message"]  # clients look for them
    assert "600 tokens" in refusal(served.complete("a" * 600))["message"]


def test_a_prompt_far_over_the_context_is_refused_before_it_is_tokenized(served, monkeypatch):
    long = "a" * 500_000
    monkeypatch.setattr(served.llm.text, "encode", None)
    for response in (
        served.chat(long),
        served.complete(long),
        served.complete(["a", long]),
        served.complete(long, add_special_tokens=False),
    ):
        error = refusal(response)
        assert error["code"] == "context_length_exceeded"
        assert "at least 416" in error["message"]
        assert "512 tokens" in error["message"]
    for body in {"prompt": long}, {"messages": [{"role": "user", "content": long}]}:
        error = refusal(served.post("/tokenize", body))
        assert error["code"] == "context_length_exceeded"
        assert "at most 16384" in error["message"]


def test_a_text_that_is_too_long_for_the_context_is_still_counted(served):
    assert served.post("/tokenize", {"prompt": "a" * 9000}).json()["count"] == 9000


def test_unknown_routes_and_methods_are_refused_in_the_same_shape(served):
    error = refusal(served.client.get("/v2/none"), 404)
    assert "/v2/none" in error["message"]
    response = served.client.get(CHAT)
    assert refusal(response, 405)["type"] == "invalid_request_error"
    assert response.headers["allow"] == "POST"
    assert refusal(served.client.get("/docs"), 404)
    assert refusal(served.client.get("/redoc"), 404)


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/classify",
     "/pooling"],
)  # fmt: skip
def test_pooling_is_refused(served, path):
    error = refusal(served.post(path, {"input": "a"}))
    assert error["code"] == "unsupported"
    assert "generates text and does not pool" in error["message"]
    assert "--runner pooling" in error["message"]


def test_s33_a_wrong_model_is_refused_with_the_names(serve):
    served = serve(served_model_name=("one", "two/b"))
    for response in (
        served.chat(model="three"),
        served.complete(model="three"),
        served.post("/tokenize", {"prompt": "a", "model": "three"}),
        served.client.get("/v1/models/three"),
    ):
        error = refusal(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'one', 'two/b'" in error["message"]
    assert served.chat().json()["model"] == "one"
    assert served.chat(model="two/b").json()["model"] == "two/b"
    listed = served.client.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["one", "two/b"]
    card = served.client.get("/v1/models/two/b").json()
    assert (card["root"], card["max_model_len"], card["object"]) == ("m/tiny", 512, "model")


def test_an_error_of_the_engine_is_a_400(serve):
    served = serve(script={"refuse": ValueError("structured_outputs.regex is '(': it is wrong")})
    error = refusal(served.chat(structured_outputs={"regex": "("}))
    assert error["param"] == "structured_outputs"
    served.llm.refuse = NotImplementedError("n=3 is not built yet")
    assert refusal(served.chat())["code"] == "unsupported"
    assert refusal(served.complete(["a", "b"]))["code"] == "unsupported"
    assert served.idle()


def test_a_fault_of_the_server_is_a_500_without_a_traceback(serve):
    served = serve(script={"refuse": KeyError("secret")})
    error = refusal(served.chat(), 500)
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]
    assert "Traceback" not in error["message"]
    response = served.client.post(
        CHAT, json={"messages": MESSAGES}, headers={"x-request-id": "look-for-me"}
    )
    assert "look-for-me" in response.json()["error"]["message"]
    assert response.headers["x-request-id"] == "look-for-me"
    assert served.idle()


def test_unknown_fields_are_named_in_a_header(served, events):
    body = {"messages": MESSAGES, "frequency_panelty": 1, "väg": 2, "store": True, "user": "u"}
    response = served.post(CHAT, body)
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "frequency_panelty, ?"
    assert "x-ignored-fields" not in served.chat(store=True, metadata={}, user="u").headers
    streamed = served.post(CHAT, {**body, "stream": True})
    assert streamed.headers["x-ignored-fields"] == "frequency_panelty, ?"
    assert events(streamed.text)


def test_too_many_log_probabilities_of_a_chat_are_named_as_there(served):
    for number in 21, -1:
        error = served.chat(logprobs=True, top_logprobs=number).json()["error"]
        assert error["param"] == "top_logprobs"
        assert error["message"].startswith(f"top_logprobs is {number}: ")
    error = served.complete(logprobs=21).json()["error"]
    assert error["param"] == "logprobs"
