"""/v1/responses: a chat in the form of OpenAI's newer route."""

import json
import random

import openai
import pytest
from nv_api.server.protocol.responses import ResponseEvent, ResponseObject
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

EOS = 256
PATH = "/v1/responses"
EVENT = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SAID = f"<think>\nWhich city?\n</think>\n\nLet me look 🙂.\n{CALL}\n{CALL}"


@pytest.fixture
def says(serve, calling):
    """A server whose model says these texts."""

    def start(*texts, **options):
        served = serve(**options)
        encode = served.llm.text.encode
        served.llm.answers = [[*encode([text], add_special_tokens=False)[0], EOS] for text in texts]
        return served

    return start


def ask(served, given="ab", **fields):
    return served.post(PATH, {"input": given, **fields}, headers={"x-request-id": "r"})


def plain(response):
    assert response.status_code == 200, response.text
    ResponseObject.model_validate_json(response.text)
    Response.model_validate_json(response.text)
    return response.json()


def stream_of(response):
    """The events of a stream; each is as its name says, and numbered."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, end = response.text.split("\n\n")
    assert end == ""
    events = []
    for number, part in enumerate(parts):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENT.validate_python(event)
        ResponseEvent.model_validate(event)
        events.append(event)
    return events


def joined(events):
    """The items that a stream amounts to, from its deltas alone."""
    items = {}
    for event in events:
        place = event.get("output_index")
        if event["type"] == "response.output_item.added":
            assert place == len(items)
            item = items[place] = event["item"]
            assert item["status"] == "in_progress"
        elif event["type"] == "response.content_part.added":
            item["content"].append(event["part"])
        elif event["type"].endswith("_text.delta"):
            assert event["item_id"] == item["id"]
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif event["type"].endswith("_text.done"):
            assert event["text"] == item["content"][0]["text"]
        elif event["type"] == "response.content_part.done":
            assert event["part"] == item["content"][0]
        elif event["type"] == "response.function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif event["type"] == "response.function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
        elif event["type"] == "response.output_item.done":
            item["status"] = event["item"]["status"]
            assert item == event["item"]
    return list(items.values())


def without_ids(items):
    return [{k: v for k, v in item.items() if k != "call_id"} for item in items]


@pytest.mark.parametrize(
    ("answer", "fields"),
    [
        ("Hello.", {}),
        ("", {}),
        (SAID, {"tools": [WEATHER]}),
        (SAID, {}),
        (CALL + "\nand then", {"tools": [WEATHER]}),
        ("<think>\nnever over", {}),
        (SAID, {"tools": [WEATHER], "max_output_tokens": 90}),
        (SAID, {"max_output_tokens": 12}),
        ("before STOP after", {"stop": ["STOP"]}),
    ],
)
def test_a_stream_joined_is_the_plain_answer(says, answer, fields):
    served = says(answer, answer)
    whole = plain(ask(served, **fields))
    events = stream_of(ask(served, stream=True, **fields))
    items = joined(events)
    assert without_ids(items) == without_ids(whole["output"])
    last = events[-1]["response"]
    assert last["output"] == items
    assert without_ids(last.pop("output")) == without_ids(whole.pop("output"))
    assert last | {"created_at": 0} == whole | {"created_at": 0}
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert all(event["response"]["output"] == [] for event in events[:2])


def test_the_order_of_events_is_openai_s(says):
    events = stream_of(ask(says(SAID), stream=True, tools=[WEATHER]))
    kinds = [event["type"].removeprefix("response.") for event in events]
    kinds = [k for k, before in zip(kinds, [None, *kinds], strict=False) if k != before]
    text = ["content_part.done", "output_item.done"]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    begun = ["output_item.added", "content_part.added"]
    assert kinds == [
        *("created", "in_progress"),
        *(*begun, "reasoning_text.delta", "reasoning_text.done", *text),
        *(*begun, "output_text.delta", "output_text.done", *text),
        *(*call, *call, "completed"),
    ]


def test_items_of_an_answer(says):
    thought, message, call, _ = plain(ask(says(SAID), tools=[WEATHER]))["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Which city?"}]
    assert message["content"][0]["text"] == "Let me look 🙂."
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Oslo"})
    assert call["call_id"].startswith("call_")
    assert [each["status"] for each in (thought, message, call)] == ["completed"] * 3


def test_an_answer_that_is_cut_is_incomplete(says):
    whole = plain(ask(says(SAID), tools=[WEATHER], max_output_tokens=90))
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in whole["output"]] == ["completed", "completed", "incomplete"]
    assert whole["usage"]["output_tokens"] == 90


def test_a_late_error_is_the_last_event(serve):
    served = serve(script={"answers": [[65, 66, -1], [-1], [65, -1]]})
    events = stream_of(ask(served, stream=True))
    assert events[-1]["type"] == "response.failed"
    assert "out of memory" in events[-1]["response"]["error"]["message"]
    kinds = [event["type"] for event in stream_of(ask(served, stream=True))]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]
    failed = ask(served)
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
    assert served.idle()


def prompt_of(served, *given, **fields):
    response = ask(served, *given, **fields)
    assert response.status_code == 200, response.text
    return served.last.prompt.text


def test_items_become_messages(says):
    given = [
        {"role": "developer", "content": "two"},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
            {"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "Looking.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"a"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [
            {"type": "input_text", "text": "sun"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c3", "name": "weather", "arguments": "{}"},
        {"role": "assistant", "content": "a later turn"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "more"}]},
        {"role": "assistant", "content": "the last"},
    ]  # fmt: skip
    call = '<tool_call>{{"name": "weather", "arguments": {}}}</tool_call>'
    text = prompt_of(says(), given, instructions="one")
    assert text == (
        "<|im_start|>system\none\n\ntwo<|im_end|>\n"
        "<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n<think>hm</think>Looking."
        + call.format('{"city": "a"}') + call.format("{}") + "<|im_end|>\n"
        "<|im_start|>tool\nrain (c1)<|im_end|>\n"
        "<|im_start|>tool\nsun (c2)<|im_end|>\n"
        "<|im_start|>assistant\n<think>so</think>" + call.format("{}") + "<|im_end|>\n"
        "<|im_start|>assistant\na later turn<|im_end|>\n"
        "<|im_start|>assistant\n<think>more</think>the last<|im_end|>\n"
        "<|im_start|>assistant\n"
    )  # fmt: skip


def test_an_answer_can_be_sent_back(says):
    served = says(SAID)
    answer = plain(ask(served, "Weather?", tools=[WEATHER]))
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    outputs = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
        for call in calls
    ]
    question = {"role": "user", "content": "Weather?"}
    text = prompt_of(served, [question, *answer["output"], *outputs], tools=[WEATHER])
    assert "<think>Which city?</think>Let me look 🙂.<tool_call>" in text
    assert text.count("rain (call_") == 2


def test_fields_and_what_the_engine_gets(says):
    served = says()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    answer = plain(
        ask(
            served,
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            seed=3,
            max_output_tokens=5,
            cache_salt="mine",
            text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
            reasoning={"effort": "none", "summary": "auto"},
            metadata={"a": "b"},
            store=True,
            include=["reasoning.encrypted_content"],
            truncation="auto",
            frequency_panelty=3,
        )
    )
    params = served.last.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.25, 7, 3)
    assert params.max_tokens == 5
    assert "structured_outputs" in params.changed(["structured_outputs"])
    assert served.last.prompt.cache_salt == "mine"
    assert served.last.prompt.text.endswith("<think></think>")
    assert (answer["temperature"], answer["top_p"], answer["max_output_tokens"]) == (0.5, 0.25, 5)
    assert answer["metadata"] == {"a": "b"}
    assert answer["store"] is False
    response = ask(served, frequency_panelty=3, user="u", store=False)
    assert response.headers["x-ignored-fields"] == "frequency_panelty"
    assert "tools=" not in served.last.prompt.text


def test_tools_and_how_they_are_chosen(says):
    served = says()
    other = {**WEATHER, "name": "now"}
    text = prompt_of(served, tools=[WEATHER, other], tool_choice="auto")
    assert '"name": "weather"' in text
    assert "strict" not in text
    assert "tools=" not in prompt_of(served, tools=[WEATHER], tool_choice="none")
    only = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    text = prompt_of(served, tools=[WEATHER, other], tool_choice=only)
    assert '"name": "now"' in text
    assert "weather" not in text


WRONG = [
    ("input", [], None),
    ("input", 5, None),
    ("input", [5], "input.0"),
    ("input", [{}], "input.0.type"),
    ("input", [{"role": "user"}], "input.0.content"),
    ("input", [{"role": "user", "content": 5}], None),
    ("input", [{"role": "", "content": "a"}], "input.0.role"),
    ("input", [{"role": "user", "content": [{"type": "input_image"}]}], None),
    ("input", [{"type": "item_reference", "id": "a"}], "input.0"),
    ("input", [{"type": "web_search_call", "id": "a"}], "input.0.type"),
    ("input", [{"type": "function_call", "name": "a"}], "input.0.call_id"),
    ("input", [{"type": "function_call", "name": "a", "call_id": "c", "arguments": "{"}], None),
    ("input", [{"type": "function_call", "name": "a", "call_id": "c"}], "input.0.arguments"),
    ("input", [{"type": "function_call_output", "call_id": "c"}], "input.0.output"),
    ("input", [{"type": "reasoning", "content": [5]}], "input.0"),
    ("input", [{"type": "reasoning", "content": 5}], "input.0.content"),
    ("input", [{"type": "reasoning", "summary": {}}], "input.0.summary"),
    ("instructions", 5, None),
    ("previous_response_id", "resp_1", None),
    ("conversation", "conv_1", None),
    ("conversation", {"id": "conv_1"}, None),
    ("background", True, None),
    ("prompt", {"id": "p"}, None),
    ("include", ["message.input_image.image_url"], None),
    ("max_output_tokens", 0, None),
    ("temperature", -1, None),
    ("top_p", 0, None),
    ("tools", [{"type": "web_search"}], "tools.0.type"),
    ("tools", [{"type": "function"}], "tools.0.name"),
    ("tool_choice", "often", None),
    ("tool_choice", {"type": "mcp"}, None),
    ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "a"}]}, None),
    ("text", {"format": {"type": "xml"}}, "text.format.type"),
    ("text", {"format": {"type": "json_schema"}}, "text.format.schema"),
    ("text", {"format": {"type": "json_schema", "schema": {"a": "x" * 70000}}}, "text.format"),
    ("reasoning", {"effort": 3}, "reasoning.effort"),
    ("reasoning", {"effort": "lots"}, "reasoning.effort"),
    ("text", {"verbosity": "loud"}, "text.verbosity"),
    ("stream_options", {"include_obfuscation": False}, "stream_options"),
    ("stream", "yes", None),
]


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.mark.parametrize("text", ["<think>\nhm\n</think>\n\nYes 🙂.", "Yes <b"])
def test_log_probabilities_are_those_of_the_answer_s_tokens(says, text):
    served = says(text, text)
    body = plain(ask(served, **LOGPROBS))
    *_, message = body["output"]
    (part,) = message["content"]
    events = stream_of(ask(served, stream=True, **LOGPROBS))
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    (done,) = [each for each in events if each["type"] == "response.output_text.done"]
    joined = [entry for each in deltas for entry in each["logprobs"]]
    answer = text.rpartition("</think>")[2]
    *shown, last = part["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in shown).decode() == answer
    assert last["token"] == served.llm.text.token_text(EOS)
    assert [len(entry["top_logprobs"]) for entry in joined] == [2] * len(joined)
    assert joined == done["logprobs"] == part["logprobs"]
    assert events[-1]["response"]["output"][-1]["content"] == [part]
    num_thoughts = len(served.llm.text.encode([text.removesuffix(answer)])[0])
    details = body["usage"]["output_tokens_details"]
    assert details == {"reasoning_tokens": num_thoughts}
    assert body["usage"]["output_tokens"] == num_thoughts + len(part["logprobs"])


def test_without_include_there_are_no_log_probabilities(says):
    served = says("Yes.")
    (message,) = plain(ask(served, top_logprobs=2))["output"]
    assert message["content"][0]["logprobs"] == []
    assert served.last.params.logprobs is None


PARTS = ("Let me look 🙂. ", "\n", "  ", "<", "<tool", CALL, f"{CALL}\n", "</tool_call>", "Done.")


@pytest.mark.parametrize("number", range(60))
def test_log_probabilities_beside_calls_are_those_of_the_messages(says, number):
    """Streamed and plain, whatever is around calls: the tokens of each message's text."""
    rng = random.Random(number)
    thought = rng.choice(["", "<think>\nhm\n</think>\n\n"])
    text = thought + "".join(rng.choices(PARTS, k=rng.randint(1, 6)))
    served = says(text, text)
    fields = {**LOGPROBS, "tools": [WEATHER]}
    body = plain(ask(served, **fields))
    events = stream_of(ask(served, stream=True, **fields))
    streamed = {}
    for event in events:
        if event["type"] == "response.output_text.delta":
            streamed.setdefault(event["output_index"], []).extend(event["logprobs"])
    messages = [item for item in body["output"] if item["type"] == "message"]
    whole = {i: item for i, item in enumerate(body["output"]) if item["type"] == "message"}
    assert streamed == {i: item["content"][0]["logprobs"] for i, item in whole.items()}
    assert events[-1]["response"]["output"][-1].keys() == body["output"][-1].keys()
    end = served.llm.text.token_text(EOS)
    for item in messages:
        (part,) = item["content"]
        shown = [entry for entry in part["logprobs"] if entry["token"] != end]
        told = b"".join(bytes(entry["bytes"]) for entry in shown).decode()
        assert told.strip("\n ") == part["text"].strip("\n "), text
        assert [len(entry["top_logprobs"]) for entry in shown] == [2] * len(shown)
    if body["output"][-1]["type"] == "message":
        assert messages[-1]["content"][0]["logprobs"][-1]["token"] == end


def test_log_probabilities_beside_calls_have_no_token_of_a_call(says):
    served = says(SAID)
    body = plain(ask(served, **LOGPROBS, tools=[WEATHER]))
    kinds = [item["type"] for item in body["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    (part,) = body["output"][1]["content"]
    told = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode()
    assert told == "\n\nLet me look 🙂." == f"\n\n{part['text'].strip()}"


def test_s33_a_wrong_model_is_refused(served):
    response = ask(served, model="three")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_openai_s_client_reads_both_kinds_of_answers(says):
    served = says(SAID, SAID, "Hi.")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(model="m/tiny", input="a", tools=[WEATHER])
        assert whole.output_text == "Let me look 🙂."
        assert [item.type for item in whole.output] == [
            "reasoning", "message", "function_call", "function_call",
        ]  # fmt: skip
        with client.responses.stream(model="m/tiny", input="a", tools=[WEATHER]) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        assert "response.output_text.delta" in kinds
        assert final.output_text == whole.output_text
        assert final.output[2].parsed_arguments is None or final.output[2].arguments
        again = client.responses.create(model="m/tiny", input=[
            *[item.model_dump(exclude_none=True) for item in whole.output],
            {"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "rain"},
        ])  # fmt: skip
        assert again.output_text == "Hi."
        with pytest.raises(openai.BadRequestError, match="keeps no responses"):
            client.responses.create(model="m/tiny", input="a", previous_response_id="resp_1")
