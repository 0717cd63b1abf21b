"""/v1/messages: a chat in Anthropic's form."""

import json

import anthropic
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from nv_api.server.protocol.messages import AnthropicErrorEnvelope, MessageEvent, MessageObject
from pydantic import TypeAdapter
from pydantic_core import from_json

EOS = 256
PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
EVENT = TypeAdapter(RawMessageStreamEvent)
WEATHER = {
    "name": "weather",
    "description": "Of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
SAID = f"<think>\nWhich city?\n</think>\n\nLet me look 🙂.\n{CALL}\n{CALL}"
USER = {"role": "user", "content": "ab"}


@pytest.fixture
def says(serve, calling):
    """A server whose model says these texts."""

    def start(*texts, script=None, **options):
        served = serve(script=script, **options)
        encode = served.llm.text.encode
        served.llm.answers = [[*encode([text], add_special_tokens=False)[0], EOS] for text in texts]
        return served

    return start


def ask(served, *messages, **fields):
    body = {"messages": list(messages) or [USER], "max_tokens": 300, **fields}
    return served.post(PATH, body, headers={"x-request-id": "r"})


def plain(response):
    assert response.status_code == 200, response.text
    MessageObject.model_validate_json(response.text)
    Message.model_validate_json(response.text)
    return response.json()


def stream_of(response):
    """The events of a stream; each is as its name says."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, end = response.text.split("\n\n")
    assert end == ""
    events = []
    for part in parts:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        MessageEvent.model_validate(event)
        if event["type"] != "error":
            EVENT.validate_python(event)
        events.append(event)
    return events


def joined(events):
    """The message that a stream amounts to."""
    first, *rest, ending, last = events
    assert (first["type"], ending["type"]) == ("message_start", "message_delta")
    assert last == {"type": "message_stop"}
    message = first["message"]
    assert message["content"] == []
    is_open, arguments = False, ""
    for event in rest:
        assert event["index"] == len(message["content"]) - is_open
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
            is_open, arguments = True, ""
            continue
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
            continue
        delta = event["delta"]
        if delta["type"] == "input_json_delta":
            arguments += delta["partial_json"]
            block["input"] = from_json(arguments, allow_partial=True)
        elif delta["type"] == "signature_delta":
            block["signature"] = delta["signature"]
        else:
            name = delta["type"].removesuffix("_delta")
            block[name] += delta[name]
    assert not is_open
    return message | ending["delta"] | {"usage": message["usage"] | ending["usage"]}


def without_ids(message):
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return message | {"content": blocks}


@pytest.mark.parametrize(
    ("answer", "fields", "reason"),
    [
        ("Hello.", {}, "end_turn"),
        ("", {}, "end_turn"),
        (SAID, {"tools": [WEATHER]}, "tool_use"),
        (SAID, {}, "end_turn"),
        (CALL + "\nand then", {"tools": [WEATHER]}, "tool_use"),
        ("<think>\nnever over", {}, "end_turn"),
        (SAID, {"tools": [WEATHER], "max_tokens": 110}, "max_tokens"),
        (SAID, {"max_tokens": 12}, "max_tokens"),
        ("before STOP after", {"stop_sequences": ["x", "STOP"]}, "stop_sequence"),
    ],
)
def test_a_stream_joined_is_the_plain_answer(says, answer, fields, reason):
    served = says(answer, answer)
    whole = plain(ask(served, **fields))
    assert whole["stop_reason"] == reason
    streamed = joined(stream_of(ask(served, stream=True, **fields)))
    assert without_ids(streamed) == without_ids(whole)


def test_blocks_of_an_answer(says):
    whole = plain(ask(says(SAID), tools=[WEATHER]))
    thought, text, call, _ = whole["content"]
    assert thought["thinking"] == "Which city?"
    assert thought["signature"]
    assert text == {"type": "text", "text": "Let me look 🙂."}
    assert (call["name"], call["input"]) == ("weather", {"city": "Oslo", "days": 2})
    assert call["id"].startswith("toolu_")
    assert whole["id"] == "msg_r"
    assert whole["model"] == "m/tiny"


def test_a_call_that_is_cut_has_the_members_that_came(says):
    cut = SAID[: SAID.index("days") + 8]
    whole = plain(ask(says(cut), tools=[WEATHER], max_tokens=len(cut) + 1))
    assert whole["content"][-1]["input"] == {"city": "Oslo", "days": 2}
    cut = SAID[: SAID.index("slo")]
    whole = plain(ask(says(cut), tools=[WEATHER]))
    assert whole["content"][-1]["input"] == {}


def test_a_stop_sequence_is_shown(says):
    served = says("before STOP after", "ab", *["before STOP"] * 2)
    whole = plain(ask(served, stop_sequences=["STOP"]))
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "STOP")
    assert whole["content"] == [{"type": "text", "text": "before "}]
    assert plain(ask(served, stop_sequences=["STOP"]))["stop_sequence"] is None
    assert ask(served, stop_sequences=[""]).status_code == 400


def test_cached_tokens_are_a_part_of_the_prompt_s(says):
    served = says("a", "a", script={"num_cached_tokens": 16})
    usage = plain(ask(served))["usage"]
    num_tokens = len(served.last.prompt.token_ids)
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (num_tokens - 16, 16)
    start, *_, ending, _ = stream_of(ask(served, stream=True))
    assert start["message"]["usage"] == usage | {"output_tokens": 0}
    assert ending["usage"] == usage


def prompt_of(served, *messages, **fields):
    response = ask(served, *messages, **fields)
    assert response.status_code == 200, response.text
    return served.last.prompt.text


def test_blocks_become_messages(says):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Looking."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "a"}},
            {"type": "tool_use", "id": "t2", "name": "weather", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": [
                {"type": "text", "text": "sun"}]},
            {"type": "text", "text": "So?"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t3"}]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}},
              {"type": "text", "text": "two"}]  # fmt: skip
    call = '<tool_call>{{"name": "weather", "arguments": {}}}</tool_call>'
    assert prompt_of(says(), *messages, system=system) == (
        "<|im_start|>system\none\ntwo<|im_end|>\n"
        "<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n<think>hm</think>Looking."
        + call.format('{"city": "a"}') + call.format("{}") + "<|im_end|>\n"
        "<|im_start|>tool\nrain (t1)<|im_end|>\n"
        "<|im_start|>tool\nsun (t2)<|im_end|>\n"
        "<|im_start|>user\nSo?<|im_end|>\n"
        "<|im_start|>tool\n (t3)<|im_end|>\n"
        "<|im_start|>assistant\n"
    )  # fmt: skip
    assert prompt_of(says(), USER, system="be brief").startswith("<|im_start|>system\nbe brief")


@pytest.mark.parametrize("content", ["The best is (", [{"type": "text", "text": "The best is ("}]])
def test_the_beginning_of_an_answer_is_continued(says, content):
    text = prompt_of(says(), USER, {"role": "assistant", "content": content})
    assert text.endswith("<|im_start|>assistant\nThe best is (")


def test_fields_and_what_the_engine_gets(says):
    served = says()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    response = ask(
        served,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        max_tokens=5,
        stop_sequences=["x"],
        thinking={"type": "disabled"},
        output_config={"format": {"type": "json_schema", "schema": schema}},
        metadata={"user_id": "u"},
        service_tier="auto",
        frequency_panelty=3,
    )
    assert response.status_code == 200, response.text
    params = served.last.params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 7)
    assert params.max_tokens == 5
    assert params.stop == ["x"]
    assert "structured_outputs" in params.changed(["structured_outputs"])
    assert served.last.prompt.text.endswith("<think></think>")
    assert response.headers["x-ignored-fields"] == "frequency_panelty"
    assert response.headers["request-id"] == "r"
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert prompt_of(served, thinking=enabled).endswith("assistant\n")


def test_tools_and_how_they_are_chosen(says):
    served = says()
    text = prompt_of(served, tools=[WEATHER], tool_choice={"type": "auto"})
    assert '"name": "weather"' in text
    assert '"parameters": {"type": "object"' in text
    assert "cache_control" not in text
    assert "tools=" not in prompt_of(served, tools=[WEATHER], tool_choice={"type": "none"})


def test_tokens_are_counted(says):
    served = says()
    fields = {"system": "s", "tools": [WEATHER]}
    counted = served.post(COUNT, {"messages": [USER], "model": "m/tiny", **fields})
    MessageTokensCount.model_validate_json(counted.text)
    assert not served.llm.submitted
    usage = plain(ask(served, **fields))["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"]}


def refusal(response, status=400, kind="invalid_request_error"):
    assert response.status_code == status, response.text
    body = response.json()
    AnthropicErrorEnvelope.model_validate(body)
    if kind != "request_too_large":  # their client has no class for it
        ErrorResponse.model_validate(body)
    assert body["error"]["type"] == kind
    assert body["request_id"] == response.headers["request-id"]
    return body["error"]["message"]


WRONG = [
    ("messages", []),
    ("messages", "a"),
    ("messages", [{"role": "tool", "content": "a"}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": [5]}]),
    ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "tool_result"}]}]),
    ("messages", [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}]}]),
    ("messages", [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "a", "content": {}}]}]),
    ("messages", [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]),
    ("messages", [{"role": "assistant", "content": [
        {"type": "tool_use", "id": "a", "name": "f"}]}]),
    ("messages", [{"role": "assistant", "content": [
        {"type": "tool_use", "name": "f", "input": {}}]}]),
    ("messages", [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]),
    ("messages", [{"role": "assistant", "content": [{"type": "thinking"}]}]),
    ("system", 5),
    ("system", [{"text": "without a type"}]),
    ("system", [5]),
    ("max_tokens", None),
    ("max_tokens", 0),
    ("max_tokens", "a"),
    ("stop_sequences", "a"),
    ("stop_sequences", [""]),
    ("temperature", -1),
    ("top_k", -2),
    ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
    ("tools", [{"input_schema": {}}]),
    ("tools", [{"name": "a"}]),
    ("tool_choice", "auto"),
    ("tool_choice", {"type": "often"}),
    ("tool_choice", {"type": "any"}),
    ("thinking", {"type": "often"}),
    ("thinking", {"type": "enabled", "budget_tokens": "a"}),
    ("output_config", {"format": {"type": "xml"}}),
    ("output_config", {"format": {"type": "json_schema", "schema": {"a": "x" * 70000}}}),
    ("container", "c"),
    ("mcp_servers", [{"type": "url"}]),
    ("stream", "yes"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda v: str(v)[:40])
def test_s07_a_wrong_field_is_refused_and_named(served, field, value):
    before = len(served.llm.submitted)
    assert field in refusal(ask(served, **{"messages": [USER], field: value}))
    assert len(served.llm.submitted) == before


def test_errors_have_anthropic_s_form_on_these_routes(serve):
    served = serve(api_key=("k",), max_body_bytes=5000)
    for path in PATH, COUNT, f"{PATH}/batches":
        assert "no API key" in refusal(served.post(path, {}), 401, "authentication_error")
    served.client.headers["x-api-key"] = "k"
    refusal(served.client.get(f"{PATH}/batches"), 404, "not_found_error")
    refusal(served.client.get(PATH), 405)
    refusal(served.client.post(PATH, content=b"{}"), 415)
    refusal(ask(served, {"role": "user", "content": "a" * 9000}), 413, "request_too_large")
    refusal(ask(served, {"role": "user", "content": "a" * 900}))
    refusal(ask(served, model="three"), 404, "not_found_error")
    refusal(served.post(COUNT, {"messages": [USER], "model": "three"}), 404, "not_found_error")
    served.llm.refuse = KeyError("secret")
    assert "secret" not in refusal(ask(served), 500, "api_error")
    served.llm.loaded = False
    assert refusal(ask(served), 503, "overloaded_error") == "the model is loading: try again later"
    assert "message" in served.post("/v1/messages2", {}).json()["error"]
    assert "type" not in served.post("/v1/messages2", {}).json()


def test_a_late_error_is_the_last_event(serve):
    served = serve(script={"answers": [[65, 66, -1], [-1], [65, -1]]})
    for number in range(2):
        events = stream_of(ask(served, stream=True))
        assert events[0]["type"] == "message_start"
        assert len(events) > 2 or number
        ErrorResponse.model_validate(events[-1])
        assert "out of memory" in events[-1]["error"]["message"]
    refusal(ask(served), 500, "api_error")
    assert served.idle()


def test_anthropic_s_client_reads_both_kinds_of_answers(says):
    served = says(SAID, SAID, "Hi.")
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        asked = {"model": "m/tiny", "max_tokens": 300, "tools": [WEATHER]}
        whole = client.messages.create(messages=[USER], **asked)
        with client.messages.stream(messages=[USER], **asked) as stream:
            assert "".join(stream.text_stream) == whole.content[1].text
            final = stream.get_final_message()
        assert [block.type for block in final.content] == [
            "thinking", "text", "tool_use", "tool_use",
        ]  # fmt: skip
        assert final.content[2].input == whole.content[2].input
        assert final.usage == whole.usage
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
            for block in final.content
            if block.type == "tool_use"
        ]
        conversation = [
            USER,
            {"role": "assistant", "content": final.content},
            {"role": "user", "content": results},
        ]
        again = client.messages.create(messages=conversation, **asked)
        assert again.content[0].text == "Hi."
        assert "<think>Which city?</think>Let me look" in served.last.prompt.text
        count = client.messages.count_tokens(messages=conversation, model="m/tiny", tools=[WEATHER])
        assert count.input_tokens == again.usage.input_tokens
        with pytest.raises(anthropic.NotFoundError) as error:
            client.messages.create(**{**asked, "model": "three"}, messages=[USER])
        assert error.value.request_id
