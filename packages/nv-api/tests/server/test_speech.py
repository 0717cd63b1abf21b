"""The parts of an answer, over a socket: thoughts, content and calls, streamed and plain.

The model is scripted: one token is one byte, so every text is cut at every character.
"""

import json

import pytest
from joining import joined_chat, plain_chat

EOS = 256
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n"
    "</tool_call>"
)
OSLO = {"name": "weather", "arguments": '{"city": "Oslo"}'}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
MESSAGES = [{"role": "user", "content": "ab"}]
THINKS_NOT = {"chat_template_kwargs": {"enable_thinking": False}}
OPENED = {"chat_template_kwargs": {"opens_thought": True}}


class Sayer:
    """A server whose model answers with a given text."""

    def __init__(self, served, events):
        self.served, self.events = served, events

    def __call__(self, text, **fields):
        """The choice that a text becomes, which is the same streamed and plain."""
        llm = self.served.llm
        ids = [token for char in text for token in llm.text.encode([char])[0]]
        llm.answers = [[]] * len(llm.submitted) + [[*ids, EOS]] * 2
        plain = self.served.chat(**fields)
        streamed = self.served.chat(stream=True, **fields)
        assert (plain.status_code, streamed.status_code) == (200, 200), plain.text
        (choice,) = plain_chat(plain.json())
        assert joined_chat(self.events(streamed.text)) == [choice]
        return choice


def said(choice):
    return [choice[key] for key in ("thoughts", "content", "calls", "finish_reason")]


@pytest.fixture(scope="module")
def say(served_speaking, events):
    return Sayer(served_speaking, events)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (CALL, None),
        (f"Let me see.\n{CALL}\n", "Let me see."),
        (f"a <tool b\n\n{CALL}\n\nSo <it> is.\n", "a <tool bSo <it> is.\n"),
    ],
)
def test_s14_a_call_cut_at_every_character(say, text, content):
    assert said(say(text, tools=TOOLS)) == [None, content, [OSLO], "tool_calls"]


def test_s14_calls_of_another_dialect(speak, events):
    say = Sayer(speak(tool_call_parser="qwen3_coder"), events)
    assert said(say(f"So.\n{CODER}", tools=TOOLS)) == [None, "So.", [OSLO], "tool_calls"]
    assert said(say(CALL, tools=TOOLS)) == [None, CALL, [], "stop"]


def test_s15_a_call_without_arguments_and_a_second_one(say):
    text = f'<tool_call>\n{{"name": "now"}}\n</tool_call>\n{CALL}'
    calls = [{"name": "now", "arguments": "{}"}, OSLO]
    assert said(say(text, tools=TOOLS)) == [None, None, calls, "tool_calls"]


def test_s15_a_tag_in_a_string(say):
    text = CALL.replace("Oslo", "a</tool_call><think>b")
    (call,) = say(text, tools=TOOLS)["calls"]
    assert json.loads(call["arguments"]) == {"city": "a</tool_call><think>b"}


def test_s15_broken_json_is_content(say):
    text = 'So <tool_call>\n{"name": "weather", "arg\n</tool_call>'
    assert said(say(text, tools=TOOLS)) == [None, text, [], "stop"]


@pytest.mark.parametrize("length", [5, 40, 52, 60])
def test_s16_max_tokens_inside_a_call(say, length):
    choice = say(CALL, tools=TOOLS, max_tokens=length)
    assert choice["finish_reason"] == "length"
    if choice["calls"]:
        (call,) = choice["calls"]
        assert call["name"] == "weather"
        assert OSLO["arguments"].startswith(call["arguments"])
    else:
        assert choice["content"] == CALL[:length]


def test_without_tools_tags_are_content(say):
    for fields in {}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}:
        assert said(say(CALL, **fields)) == [None, CALL, [], "stop"]


def test_s17_thoughts_and_content_apart(say):
    text = "<think>\nhm <b>\n</think>\n\nYes.\n"
    assert said(say(text)) == ["hm <b>", "Yes.\n", [], "stop"]
    assert said(say(text.removeprefix("<think>"), **OPENED)) == ["hm <b>", "Yes.\n", [], "stop"]
    assert said(say("Yes.\n", **THINKS_NOT)) == [None, "Yes.\n", [], "stop"]
    assert said(say(text, **THINKS_NOT)) == [None, text, [], "stop"]
    assert said(say("<think>\n\n</think>\n\nYes.")) == [None, "Yes.", [], "stop"]


def test_s17_a_thought_that_is_cut(say):
    assert said(say("<think>\nhm </thi", max_tokens=16)) == ["hm </thi", None, [], "length"]
    assert said(say("hm", **OPENED)) == ["hm", None, [], "stop"]
    assert said(say(" <th", max_tokens=4)) == [None, " <th", [], "length"]


def test_s17_thoughts_then_a_call(say):
    text = f"<think>I write {CALL}</think>\n{CALL}"
    thoughts = f"I write {CALL}"
    assert said(say(text, tools=TOOLS)) == [thoughts, None, [OSLO], "tool_calls"]


def test_s17_thoughts_can_be_left_out(say):
    choice = say("<think>hm</think>Yes.", include_reasoning=False)
    assert said(choice) == [None, "Yes.", [], "stop"]
    assert said(say("<think>hm", include_reasoning=False)) == [None, "", [], "stop"]
    body = say.served.chat(include_reasoning=False).json()
    assert body["choices"][0]["message"].keys() == {"role", "content", "refusal"}


def test_s17_parsers_can_be_turned_off(speak, events):
    say = Sayer(speak(reasoning_parser="none", tool_call_parser="none"), events)
    text = f"<think>hm</think>{CALL}"
    assert said(say(text, tools=TOOLS)) == [None, text, [], "stop"]
    assert str(say.served.service.parsers) == "thoughts none, tool calls none"
    refused = say.served.chat(tools=TOOLS, tool_choice="required")
    assert "--tool-call-parser" in refused.json()["error"]["message"]


def test_s17_the_template_chooses_the_parsers(say):
    assert str(say.served.service.parsers) == "thoughts qwen3, tool calls hermes"


@pytest.mark.parametrize(
    "fields", [{"logprobs": True, "top_logprobs": 1}, {"return_token_ids": True}]
)
def test_every_token_has_its_log_probability_and_id(say, fields):
    text = f"<think>hm</think>So.\n{CALL}"
    choice = say(text, tools=TOOLS, **fields)
    assert said(choice) == ["hm", "So.", [OSLO], "tool_calls"]
    assert len(choice["logprobs"] or choice["ids"]) == len(text) + 1
    for empty in "", "<think>":
        choice = say(empty, **fields)
        assert said(choice) == [None, "", [], "stop"]


@pytest.mark.parametrize(
    ("text", "thoughts", "content"),
    [
        ("<think>a STOP b</think>c STOP d", "a STOP b", "c "),
        ("<think>a ST</think>OP b", "a ST", "OP b"),
        ("STOP", None, ""),
    ],
)
def test_s20_stop_strings_are_searched_after_the_thought(say, text, thoughts, content):
    choice = say(text, stop=["STOP"])
    assert (choice["thoughts"], choice["content"]) == (thoughts, content)
    assert choice["stop_reason"] == ("STOP" if "STOP" in text.split("</think>")[-1] else None)
    if thoughts:
        choice = say(text.removeprefix("<think>"), stop=["STOP"], **OPENED)
        assert (choice["thoughts"], choice["content"]) == (thoughts, content)


def test_s20_completions_are_searched_from_the_beginning(say):
    llm = say.served.llm
    ids = llm.text.encode(["<think>a STOP b"])[0]
    llm.answers = [[]] * len(llm.submitted) + [[*ids, EOS]]
    (choice,) = say.served.complete(stop="STOP").json()["choices"]
    assert choice["text"] == "<think>a "


def test_a_stream_s_first_chunk_of_a_call_has_its_name_alone(say):
    say(f"<think>hm</think>{CALL}", tools=TOOLS)
    llm = say.served.llm
    llm.answers = [[]] * len(llm.submitted) + [llm.answers[-1]]
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in say.events(say.served.chat(tools=TOOLS, stream=True).text)
    ]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert deltas[1]["reasoning_content"][0] == "h"
    first = next(delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta)
    assert first["function"] == {"name": "weather", "arguments": ""}
    assert deltas[-1] == {}


def test_an_answer_can_be_sent_back(say):
    say(f"<think>hm</think>{CALL}", tools=TOOLS)
    llm = say.served.llm
    for text, shown in (
        (f"<think>hm</think>{CALL}", "<think>hm</think><tool_call>"),
        ("<think>hm", "<think>hm</think><|im_end|>"),
    ):
        ids = llm.text.encode([text])[0]
        llm.answers = [[]] * len(llm.submitted) + [[*ids, EOS]]
        message = say.served.chat(tools=TOOLS).json()["choices"][0]["message"]
        assert message["content"] is None
        messages = [*MESSAGES, message, {"role": "user", "content": "c"}]
        response = say.served.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS})
        assert response.status_code == 200, response.text
        assert shown in say.served.last.prompt.text


def weather(parameters):
    return {"type": "function", "function": {"name": "weather", "parameters": parameters}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "'custom'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "None"),
        ({"tools": [TOOLS[0], {"function": {}}]}, "tools[1].function.name", "None"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", "'a b'"),
        ({"tools": [{"function": {"name": "a<b"}}]}, "tools[0].function.name", "'a<b'"),
        ({"tools": [weather(5)]}, "tools[0].function.parameters", "5"),
        (
            {"tools": [{"function": {"name": "a", "description": 7}}]},
            "tools[0].function.description",
            "7",
        ),
        ({"tool_choice": "often", "tools": TOOLS}, "tool_choice", "'often'"),
        ({"tool_choice": {"type": "x"}, "tools": TOOLS}, "tool_choice", "'x'"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice", "name"),
        ({"tool_choice": {"function": {"name": "y"}}, "tools": TOOLS}, "tool_choice", "'y'"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        (
            {"tool_choice": "required", "tools": TOOLS, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "one of them",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
            "one of them",
        ),
    ],
)  # fmt: skip
def test_s07_wrong_tools_are_refused_and_named(say, fields, param, words):
    error = say.served.chat(**fields).json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_s32_schemas_that_are_too_large_or_deep_are_refused_and_named(speak):
    served = speak(max_grammar_bytes=1000, max_grammar_depth=6)
    large = {"type": "object", "description": "x" * 1200}
    half = {"type": "object", "description": "x" * 600}
    deep = {"a": {"a": {"a": {"a": {"a": {"a": {}}}}}}}
    for schema, words in (large, "bytes long"), (deep, "7 levels deep"):
        asked = {"type": "json_schema", "json_schema": {"schema": schema}}
        error = served.chat(response_format=asked).json()["error"]
        assert error["param"] == "response_format"
        assert words in error["message"]
        error = served.chat(tools=[TOOLS[1], weather(schema)], tool_choice="required").json()[
            "error"
        ]
        assert error["param"] == "tools[1].function.parameters"
        assert words in error["message"]
    error = served.chat(tools=[weather(half)] * 2, tool_choice="required").json()["error"]
    assert error["param"] == "tools[1].function.parameters"
    assert served.chat(tools=[weather(large)]).status_code == 200, "a free call needs no grammar"


def test_an_unknown_parser_is_refused_at_the_start(speak):
    with pytest.raises(ValueError, match="reasoning_parser is 'r1': it must be one of none, qwen3"):
        speak(reasoning_parser="r1")
    with pytest.raises(ValueError, match="tool_call_parser is 'x'"):
        speak(tool_call_parser="x")
