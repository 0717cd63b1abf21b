"""Forms that a request forces on its answer, over a socket, with the real engine's masks."""

import json
import re

import pytest
from joining import joined_chat, plain_chat
from scripted_device import EOS, ScriptedDevice

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "is_dry": {"type": "boolean"}},
    "required": ["city", "is_dry"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
CITIES = re.compile(r'\{\s*"city"\s*:\s*"(Oslo|Rome)"\s*,\s*"is_dry"\s*:\s*(true|false)\s*\}')
OSLO = '{"city": "Oslo", "is_dry": true}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
OPENED = {"chat_template_kwargs": {"opens_thought": True}}
THINKS_NOT = {"chat_template_kwargs": {"enable_thinking": False}}


def said(choice):
    return [choice[key] for key in ("thoughts", "content", "calls", "finish_reason")]


class Script:
    """A device that says a text, byte by byte, and does not read masks: the engine checks it."""

    def __init__(self, speaking):
        self.device = ScriptedDevice(lambda _: self.ids)
        self._tokenizer = speaking
        self.text = ""

    @property
    def ids(self):
        """Tags are tokens; all else is a token a byte."""
        parts = re.split("(</?(?:think|tool_call)>)", self.text)
        pieces = [p for part in parts for p in ([part] if part[:1] == "<" else part)]
        encode = self._tokenizer.encode
        return [token for piece in pieces for token in encode(piece, add_special_tokens=False)] + [
            EOS
        ]


@pytest.fixture
def scripted_engine(engine_server, speaking, events):
    """Send a chat to an engine whose device says a text; the answer, streamed and plain."""
    script = Script(speaking)
    served = engine_server(script.device)

    def send(text, **fields):
        script.text = text
        plain = served.chat(**fields)
        if plain.status_code != 200:
            return plain.json()["error"]
        streamed = served.chat(stream=True, **fields)
        (choice,) = plain_chat(plain.json())
        assert joined_chat(events(streamed.text)) == [choice]
        return said(choice)

    return send


def test_s16_s18_forms_begin_after_the_thoughts(scripted_engine):
    """Thoughts are free, then comes the form and nothing else."""
    say, thought = scripted_engine, "<think>\nhm {\n</think>\n\n"
    weather = {"name": "weather", "arguments": OSLO}
    now = {"name": "now", "arguments": "{}"}
    own = {"regex": "[a/]b/(?i:C)\n*"}
    lark = 'start: "x" inner\ninner: /y+/ "/"'
    cases = [
        ({"response_format": FORMAT}, OSLO, [OSLO, [], "stop"]),
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', ['{"a": [1]}', [], "stop"]),
        ({"tools": TOOLS, "tool_choice": "required"}, f"{CALL}\n{NOW}",
         [None, [weather, now], "tool_calls"]),
        ({"tools": TOOLS, "tool_choice": NAMED}, CALL, [None, [weather], "stop"]),
        ({"tools": TOOLS, "parallel_tool_calls": False}, f"So.\n{NOW}",
         ["So.", [now], "tool_calls"]),
        ({"tools": TOOLS, "response_format": FORMAT}, OSLO, [OSLO, [], "stop"]),
        ({"tools": TOOLS, "response_format": FORMAT}, NOW, [None, [now], "tool_calls"]),
        ({"structured_outputs": own}, "/b/c\n", ["/b/c\n", [], "stop"]),
        ({"structured_outputs": {"choice": ["yes", "a/b"]}}, "a/b", ["a/b", [], "stop"]),
        ({"structured_outputs": {"json": CITY}}, OSLO, [OSLO, [], "stop"]),
        ({"structured_outputs": {"json": json.dumps(CITY), "disable_any_whitespace": True}},
         OSLO.replace(" ", ""), [OSLO.replace(" ", ""), [], "stop"]),
        ({"structured_outputs": {"grammar": lark}}, "xyy/", ["xyy/", [], "stop"]),
        ({"structured_outputs": {"grammar": 'root ::= "é" [0-9]+'}}, "é12", ["é12", [], "stop"]),
    ]  # fmt: skip
    for fields, text, answer in cases:
        assert say(thought + text, **fields) == ["hm {", *answer], fields
        assert say(thought.removeprefix("<think>") + text, **fields, **OPENED) == ["hm {", *answer]
        assert say(text, **fields) == [None, *answer]
        assert say(text, **fields, **THINKS_NOT) == [None, *answer]


def test_s20_stop_strings_are_searched_after_the_thought(scripted_engine):
    answer = ["a STOP", "b ", [], "stop"]
    assert scripted_engine("<think>a STOP</think>b STOP c", stop=["STOP"]) == answer
    assert scripted_engine("a STOP</think>b STOP c", stop=["STOP"], **OPENED) == answer


def test_s12_s16_a_text_that_does_not_fit_its_form_is_an_error(scripted_engine):
    say = scripted_engine
    for fields, text in (
        ({"response_format": FORMAT}, f"<think>hm</think>So {OSLO}"),
        ({"response_format": FORMAT}, f"{OSLO[:12]}         {OSLO[12:]}"),
        ({"tools": TOOLS, "tool_choice": NAMED}, NOW),
        ({"tools": TOOLS, "tool_choice": "required"}, "So."),
        ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
         f"{NOW}\n{NOW}"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, f"{NOW}\n{NOW}"),
        ({"structured_outputs": {"choice": ["yes"]}}, "<think>hm</think>no"),
    ):  # fmt: skip
        error = say(text, **fields)
        assert error["code"] == "engine_error", (fields, error)


def test_s07_a_schema_that_does_not_compile_is_named(scripted_engine):
    bad = {"type": "object", "not": {}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "nosuch"}}}
    for fields, param, words in (
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": bad}}},
         "response_format", "not"),
        ({"tools": [*TOOLS, tool], "tool_choice": "required"},
         "tools[2].function.parameters", "nosuch"),
        ({"tools": [tool], "parallel_tool_calls": False},
         "tools[0].function.parameters", "nosuch"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex", "'a('"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "x"),
        ({"structured_outputs": {"grammar": "none"}}, "structured_outputs", "it has no rule"),
    ):  # fmt: skip
        error = scripted_engine("", **fields)
        assert error["param"] == param, error
        assert words in error["message"], error
        assert "%llguidance" not in error["message"]
        assert error["type"] == "invalid_request_error"


@pytest.fixture
def tiny(engine_server, events, speaking):
    """Send a chat to the tiny random model; the answer, streamed and plain."""
    served = engine_server()
    more = {"max_tokens": 400, "temperature": 1.0, "top_k": 0}
    biases = {"256": 4, str(speaking.convert_tokens_to_ids("</think>")): 3}

    def send(seed, bias=None, **fields):
        fields = {**more, "logit_bias": {**biases, **(bias or {})}, "seed": seed, **fields}
        plain = served.chat(**fields)
        assert plain.status_code == 200, plain.text
        (choice,) = plain_chat(plain.json())
        assert joined_chat(events(served.chat(stream=True, **fields).text)) == [choice]
        return choice

    return send


def test_s12_s16_s18_whatever_a_model_draws_fits_the_form(tiny, speaking):
    """Of a model that knows nothing: the masks alone make the form."""
    space = str(speaking.convert_tokens_to_ids("Ġ"))
    for seed in range(3):
        choice = tiny(seed, {space: 100}, response_format=FORMAT, **THINKS_NOT)
        assert CITIES.fullmatch(choice["content"])
        assert max(map(len, re.findall(" +", choice["content"]))) == 8
        choice = tiny(seed, response_format=FORMAT, **OPENED)
        assert choice["thoughts"], "thoughts are free"
        assert CITIES.fullmatch(choice["content"])
        for tool_choice, reason in (("required", "tool_calls"), (NAMED, "stop")):
            choice = tiny(seed, tools=TOOLS, tool_choice=tool_choice, **OPENED)
            assert choice["content"] is None
            assert choice["finish_reason"] == reason
            for call in choice["calls"]:
                pattern = {"weather": CITIES, "now": re.compile(r"\{\s*\}")}[call["name"]]
                assert pattern.fullmatch(call["arguments"])
        assert len(choice["calls"]) == 1
