"""The parts of an answer: thoughts, content and calls, however its text is cut."""

import json
import re
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nv_api.said import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Function,
    Place,
    Speech,
    Thought,
    ThoughtScope,
    ToolCalls,
    reasoning_parser,
    tool_call_parser,
)
from nv_api.said.events import joined
from nv_api.said.json_object import JSONObject, Mark
from nv_api.said.scope import place_after
from nv_api.said.tool_calls import new_id
from nv_api.stopping import StopStrings

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "is_dry": {"type": "boolean"},
        "unit": {"$ref": "#/$defs/Unit"},
        "where": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        "either": {"type": ["integer", "string"]},
        "code": {"enum": [1, 2]},
    },
    "$defs": {"Unit": {"enum": ["C", "F"]}},
}
FUNCTIONS = [Function("weather", WEATHER), Function("now")]


def reading(dialect="hermes", place=Place.AFTER):
    ids = iter(f"call_{i}" for i in range(1000))
    calls = ToolCalls(TOOL_CALL_PARSERS[dialect], FUNCTIONS, lambda: next(ids))
    return Speech(REASONING_PARSERS["qwen3"](place), calls)


def read(pieces, reason="stop", **options):
    """All events, neighbours joined, and the reason."""
    speech = reading(**options)
    events = [event for piece in pieces for event in speech.push(piece)]
    ending = speech.finish(reason)
    return joined([*events, *ending.events]), ending.finish_reason


def cuts(text):
    """A text whole, character by character, and cut once at every place."""
    yield [text]
    yield list(text)
    for i in range(1, len(text)):
        yield [text[:i], text[i:]]


SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=5)


def pieces_of(text, sizes):
    """A text in pieces of these sizes, over and over."""
    pieces, endless = [], cycle(sizes)
    while text:
        size = next(endless)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def check(text, events, reason="stop", **options):
    for pieces in cuts(text):
        assert read(pieces, **options) == (events, reason), pieces


def call(index, name, arguments, *, is_whole=True):
    return [
        CallBegun(index, f"call_{index}", name),
        Arguments(index, arguments),
        CallEnded(index, is_whole),
    ]


# Hermes

OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
OSLO_CALL = call(0, "weather", '{"city": "Oslo", "days": 2}')


@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), ("Let me see.\n\n", "\n"), ("a <tool b </tool_call> c\n", "\n\nIt is\nso.\n")],
)
def test_s14_calls_cut_at_every_character(before, after):
    events = [Content(before.strip("\n"))] if before else []
    events += OSLO_CALL
    events += [Content(after.lstrip("\n"))] if after.strip("\n") else []
    check(before + OSLO + after, events, "tool_calls")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "now", "arguments": {}}',
        '{"name": "now"}',
        '{"name": "now", "arguments": null}',
        ' { "arguments" :{} , "name":"n\\u006fw" } ',
    ],
)
def test_s15_a_call_without_arguments(text):
    check(f"<tool_call>{text}</tool_call>", call(0, "now", "{}"), "tool_calls")


def test_s15_two_calls():
    for between in ("", "\n", "\n\n"):
        text = OSLO + between + OSLO.replace("Oslo", "Bergen")
        second = call(1, "weather", '{"city": "Bergen", "days": 2}')
        check(text, OSLO_CALL + second, "tool_calls")
    again = call(1, "weather", '{"city": "Oslo", "days": 2}')
    check(f"{OSLO}\nand\n{OSLO}", [*OSLO_CALL, Content("and"), *again], "tool_calls")


@pytest.mark.parametrize("tag", ["</tool_call>", "<tool_call>", "</think>", '\\"</tool_call>\\\\'])
def test_s15_a_tag_in_a_string_ends_nothing(tag):
    arguments = f'{{"city": "a{tag}\\n", "days": [{{"x": "{tag}"}}]}}'
    text = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    check(text, call(0, "weather", arguments), "tool_calls")
    early = f'<tool_call>{{"arguments": {arguments}, "id": "{tag}", "name": "weather"}}</tool_call>'
    check(early, call(0, "weather", arguments), "tool_calls")


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "weather(Oslo)",
        '{"name": "weather", ',
        '{"name": "weather", "arguments": ',
        '{"name": "weather", "arguments": [1]}',
        '{"name": "weather", "arguments": "{}"}',
        '{"name": "weather", "arguments": nil}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"arguments": {"city": "Oslo"}}',
        '{"arguments": {"city": "Oslo"}, "name": "weather',
        "{}",
        "{'name': 'weather'}",
        '["weather"]',
    ],
)
def test_s15_text_that_is_not_a_call_is_content(inside):
    for text in (
        f"see\n<tool_call>\n{inside}",
        f"see\n\n<tool_call>\n{inside}\n</tool_call>\n",
        f"<tool_call>{inside}\nmore",
    ):
        check(text, [Content(text)])
    both = f"<tool_call>{inside}\n</tool_call>\n{OSLO}"
    check(both, [Content(f"<tool_call>{inside}\n</tool_call>"), *OSLO_CALL], "tool_calls")


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"city": "Os\nlo"}}', '{"city": "Os\nlo"}}'),
        ('{"city": "Oslo}}', '{"city": "Oslo}}'),
        ('{"city": Oslo}}', '{"city": Oslo}}'),
        ('{"days": 02}}', '{"days": 02}}'),
        ('{"days": NaN}}', '{"days": NaN}}'),
        ('{"days": [1}}', '{"days": [1}}'),
        ('{"days": 1,}}', '{"days": 1,}}'),
        ('{"days": "\\x"}}', '{"days": "\\x"}}'),
        ("{" + '"a":[' * 120, "{" + '"a":[' * 120),
    ],
)
def test_s15_arguments_that_break_after_the_call_began_stand_as_they_came(written, arguments):
    text = f'<tool_call>\n{{"name": "weather", "arguments": {written}'
    broken = call(0, "weather", arguments, is_whole=False)
    check(text, broken)
    check(f"{text}\n</tool_call>\nSorry.\n", [*broken, Content("Sorry.\n")])
    second = call(1, "weather", '{"city": "Oslo", "days": 2}')
    check(f"{text}\n{OSLO}", [*broken, *second], "tool_calls")
    with pytest.raises(ValueError, match=r".*"):
        json.loads(arguments, parse_constant=float)


@pytest.mark.parametrize(
    ("frame", "content"),
    [
        ("", ""),
        ("\n", ""),
        ("}}", "}"),
        (', "id": 3}', ""),
        (', "arguments": {"city": 3}, "name": "x"}', ""),
        (', "id": oh', ', "id": oh'),
        ("} and more", "and more"),
    ],
)
def test_a_call_with_whole_arguments_is_whole(frame, content):
    text = f'<tool_call>\n{{"name": "now", "arguments": {{"a": 1}}{frame}\n</tool_call>\nok'
    events = [*call(0, "now", '{"a": 1}'), Content(content + "ok")]
    check(text, events, "tool_calls")


def test_a_name_is_sent_when_the_arguments_begin():
    speech = reading()
    assert speech.push('<tool_call>\n{"name": "weather", "arguments": ') == []
    assert speech.push('{"ci') == [CallBegun(0, "call_0", "weather"), Arguments(0, '{"ci')]
    assert speech.push('ty": "O') == [Arguments(0, 'ty": "O')]
    assert speech.push("slo") == [Arguments(0, "slo")]
    assert speech.push('"}}\n</tool') == [Arguments(0, '"}'), CallEnded(0, is_whole=True)]
    assert speech.finish("stop") == ([Content("</tool")], "tool_calls")


def test_content_is_sent_as_it_comes():
    speech = reading()
    assert speech.push("a < b") == [Content("a < b")]
    assert speech.push(" <tool") == [Content(" ")]
    assert speech.push("box>\n") == [Content("<toolbox>")]
    assert speech.push("x") == [Content("\nx")]
    assert speech.push("") == []


@pytest.mark.parametrize("place", range(len('"arguments": {"city": "Oslo"'), len(OSLO) - 12))
def test_s16_max_tokens_inside_a_call(place):
    for pieces in cuts(OSLO[:place]):
        events, reason = read(pieces, "length")
        assert reason == "length"
        assert not any(isinstance(event, Content) for event in events if len(events) > 1)


def test_s16_reasons():
    whole = OSLO + "\n"
    assert read([whole])[1] == "tool_calls"
    assert read([whole + OSLO[:60]])[1] == "tool_calls"
    assert read([OSLO[:60]])[1] == "stop"
    assert read([whole], "length")[1] == "length"
    assert read([whole], "abort")[1] == "abort"
    speech = reading()
    speech.push(whole)
    assert speech.finish("stop", called="stop").finish_reason == "stop"
    assert read(["plain"])[1] == "stop"


def test_ids_are_as_openai_s():
    ids = {new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("call_[A-Za-z0-9]{24}", each) for each in ids)


# Qwen3-Coder


def coder(name, *parameters):
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def test_s14_coder_calls_cut_at_every_character():
    text = coder("weather", ("city", 'Os\n"lo"'), ("days", "2")) + "\n" + coder("now")
    first = call(0, "weather", '{"city": "Os\\n\\"lo\\"", "days": 2}')
    events = [Content("Hm."), *first, *call(1, "now", "{}"), Content("Done.")]
    check(f"Hm.\n\n{text}\n\nDone.", events, "tool_calls", dialect="qwen3_coder")


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("city", "3", '"3"'),
        ("city", "", '""'),
        ("city", "\n\n", '"\\n\\n"'),
        ("city", "null", '"null"'),
        ("city", "é\t\\", '"é\\t\\\\"'),
        ("days", "3", "3"),
        ("days", " 3 ", "3"),
        ("days", "3.0", "3"),
        ("days", "3.5", '"3.5"'),
        ("days", "three", '"three"'),
        ("days", "true", '"true"'),
        ("share", "3", "3"),
        ("share", "0.25", "0.25"),
        ("share", "1e999", "1e999"),
        ("share", "NaN", '"NaN"'),
        ("is_dry", "True", "true"),
        ("is_dry", "false", "false"),
        ("is_dry", "1", '"1"'),
        ("unit", "C", '"C"'),
        ("where", '{"a": [1,\n2]}', '{"a": [1,\n2]}'),
        ("where", "None", "null"),
        ("where", "null", "null"),
        ("where", "[" * 10000, json.dumps("[" * 10000)),
        ("either", "12", "12"),
        ("either", "1x", '"1x"'),
        ("code", "2", "2"),
        ("unknown", "7", '"7"'),
    ],
)
def test_coder_values_have_the_types_of_the_schema(key, written, value):
    text = coder("weather", (key, written))
    expected = (call(0, "weather", f'{{"{key}": {value}}}'), "tool_calls")
    for pieces in cuts(text) if len(text) < 200 else ([text], list(text)):
        assert read(pieces, dialect="qwen3_coder") == expected


@pytest.mark.parametrize("tag", ["</tool_call>", "<tool_call>", "</function>", "<parameter=x>"])
def test_s15_a_tag_in_a_coder_text_ends_nothing(tag):
    text = coder("weather", ("city", f"a{tag}b"), ("days", f"{tag}"))
    arguments = json.dumps({"city": f"a{tag}b", "days": tag})
    check(text, call(0, "weather", arguments), "tool_calls", dialect="qwen3_coder")


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "weather",
        "<function>",
        "<function=>",
        "<function=a\nb>",
        "<function=weather>\nOslo",
        "<function=weather>\n<parameter>",
        "<function=weather>\n<parameter=city",
        f"<function={'x' * 300}>",
    ],
)
def test_s15_text_that_is_not_a_coder_call_is_content(inside):
    text = f"see\n<tool_call>\n{inside}\n"
    check(text, [Content(text)], dialect="qwen3_coder")


def test_s15_a_coder_call_that_breaks_stays_open():
    head = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo"
    options = {"dialect": "qwen3_coder"}
    cut = call(0, "weather", '{"city": "Oslo', is_whole=False)
    check(head, cut, **options)
    check(
        f"{head}\n</param",
        call(0, "weather", '{"city": "Oslo\\n</param', is_whole=False),
        **options,
    )
    between = call(0, "weather", '{"city": "Oslo"', is_whole=False)
    check(f"{head}\n</parameter>\n<para", between, **options)
    noise = [*between, Content("noise")]
    check(f"{head}\n</parameter>\nnoise</tool_call>", noise, **options)
    days = "<tool_call>\n<function=weather>\n<parameter=days>\n12"
    check(days, call(0, "weather", '{"days": 12', is_whole=False), **options)


def test_a_coder_call_may_lack_inner_closing_tags():
    options = {"dialect": "qwen3_coder"}
    expected = call(0, "weather", '{"city": "Oslo"}')
    head = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n"
    check(f"{head}</function>\n</tool_call>", expected, "tool_calls", **options)
    check(f"{head}</parameter>\n</tool_call>", expected, "tool_calls", **options)


# Thoughts


@pytest.mark.parametrize(
    ("place", "text", "events"),
    [
        (Place.BEFORE, "<think>\nhm\n</think>\n\nYes.\n", [Thought("hm"), Content("Yes.\n")]),
        (Place.BEFORE, " \n<think>hm</think>Yes.", [Thought("hm"), Content("Yes.")]),
        (Place.BEFORE, "<think>\n\n</think>\n\nYes.", [Content("Yes.")]),
        (Place.BEFORE, "<think>\nhm\n\nhm\n", [Thought("hm\n\nhm\n")]),
        (Place.BEFORE, "<think>\nhm\n</thi", [Thought("hm\n</thi")]),
        (Place.BEFORE, "Yes.\n<think>\nhm", [Content("Yes.\n<think>\nhm")]),
        (Place.BEFORE, " <thin", [Content(" <thin")]),
        (Place.BEFORE, "\n\n<thing>", [Content("\n\n<thing>")]),
        (Place.OPENED, "\nhm\n</think>\n\nYes.", [Thought("hm"), Content("Yes.")]),
        (Place.OPENED, "<think> </think> a</think>", [Thought("<think> "), Content(" a</think>")]),
        (Place.OPENED, "\nhm", [Thought("hm")]),
        (Place.INSIDE, "\nhm\n</think>\nYes.", [Thought("\nhm"), Content("Yes.")]),
        (Place.AFTER, "<think>\nhm</think>", [Content("<think>\nhm</think>")]),
    ],
)  # fmt: skip
def test_s17_thoughts_and_content_apart(place, text, events):
    check(text, events, place=place)


def test_s17_thoughts_are_not_searched_for_calls():
    events = [Thought(f"I write\n{OSLO}"), *OSLO_CALL]
    check(f"<think>I write\n{OSLO}\n</think>\n\n{OSLO}", events, "tool_calls", place=Place.BEFORE)
    check(f"<think>{OSLO}", [Thought(OSLO)], place=Place.BEFORE)


def test_s17_whether_a_thought_is_open():
    scope = ThoughtScope(Place.BEFORE)
    seen = []
    for piece in ["\n", "<think", ">", "\nhm", "</thi", "nk>", "\n", "Yes."]:
        scope.push(piece)
        seen.append(scope.is_inside)
    assert seen == [False, False, True, True, True, False, False, False]


TURN = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        (TURN, Place.BEFORE),
        (f"{TURN}<think>\n", Place.OPENED),
        (f"{TURN}<think>", Place.OPENED),
        (f"{TURN}<think>\n\n</think>\n\n", Place.AFTER),
        (f"{TURN}<think>\nI was ", Place.INSIDE),
        (f"{TURN}Yes, ", Place.AFTER),
        (f"{TURN}<think>\nhm\n</think>\n\nYes, ", Place.AFTER),
        ("User: a <think> b\nAssistant:", Place.BEFORE),
        ("User: a\nAssistant:<think>\n", Place.OPENED),
        ("", Place.BEFORE),
    ],
)
def test_s17_where_the_text_after_a_prompt_begins(prompt, place):
    assert place_after(prompt) is place


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "\n", " ", "hm", "STOP"])
    ),
    st.sampled_from(Place),
    SIZES,
)
def test_s20_stop_strings_are_searched_outside_of_thoughts_only(parts, place, sizes):
    text = "".join(parts)
    scope, whole = ThoughtScope(place), ThoughtScope(place)
    once = whole.push(text)
    thought = once.thought
    found = ["", ""]
    for piece in pieces_of(text, sizes):
        parted = scope.push(piece)
        found[0] += parted.thought
        found[1] += parted.rest
        assert not (parted.thought and found[1][: -len(parted.rest) or None])
    assert found == [thought, once.rest]
    assert "".join(found) + scope.finish().rest == text
    stops = StopStrings(("STOP",))
    stopped = stops.push(found[1])
    events, _ = read([thought, stopped.text + stops.flush().text], place=place)
    assert ("STOP" in thought) == any("STOP" in e.text for e in events if isinstance(e, Thought))
    assert not any("STOP" in e.text for e in events if isinstance(e, Content))


# Any text


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool_call>\n", "\n</tool_call>", "<think>", "</think>", "\n",
    '{"name": "weather", "arguments": ', '{"name": "now"', '"name": "now"', '{"city": "', '{"a": 1',
    '{"arguments": {}, ', '"', "}", "}}", "{", "[", "]", ", ", ": ", "1", "-", "null", "\\", "<",
    "<function=weather>\n", "<function=now>", "</function>", "\n</function>\n</tool_call>",
    "<parameter=city>\n", "<parameter=days>", "\n</parameter>\n", "</parameter>", ">", "</",
    OSLO, coder("weather", ("days", "4")),
]  # fmt: skip
NOISE = st.integers(0, 9).map(lambda i: f"~{i}~")
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), NOISE, st.text(max_size=3)), max_size=14)
DIALECTS = st.sampled_from(sorted(TOOL_CALL_PARSERS))


@settings(max_examples=200, deadline=None)
@given(TEXTS, DIALECTS, st.sampled_from(Place), SIZES)
def test_any_text_cut_anywhere_is_what_the_whole_is(parts, dialect, place, sizes):
    text = "".join(parts)
    whole = read([text], dialect=dialect, place=place)
    assert read(pieces_of(text, sizes), dialect=dialect, place=place) == whole
    assert read(list(text), dialect=dialect, place=place) == whole


@settings(max_examples=200, deadline=None)
@given(TEXTS, DIALECTS, st.sampled_from(Place), SIZES)
def test_a_piece_that_passes_need_not_be_pushed(parts, dialect, place, sizes):
    text = "".join(parts)
    speech, events = reading(dialect, place), []
    for piece in pieces_of(text, sizes):
        events += [Content(piece)] if speech.passes(piece) else speech.push(piece)
    events += speech.finish("stop").events
    assert joined(events) == read([text], dialect=dialect, place=place)[0]


def test_content_passes_once_a_thought_is_over():
    speech = reading(place=Place.OPENED)
    assert not speech.passes("a")
    speech.push("hm</think>\n")
    assert not speech.passes("a"), "newlines belong to the tag"
    speech.push("a")
    assert speech.passes("b")
    assert not speech.passes("<")
    assert Speech(None, None).passes("<")


@settings(max_examples=200, deadline=None)
@given(TEXTS, DIALECTS)
def test_any_text_is_accounted_for(parts, dialect):
    """Without a call all of it is content; with one, all but syntax and the space next to it."""
    text = "".join(parts)
    events, _ = read([text], dialect=dialect)
    said = "".join(getattr(event, "text", getattr(event, "name", "")) for event in events)
    if not any(isinstance(event, CallBegun) for event in events):
        assert said == text
        return
    strings = "".join(re.findall(r'"[^"]*"', text))  # those of other members are left out
    for noise in re.findall("~[0-9]~", text):
        assert said.count(noise) == text.count(noise) or noise in strings


@settings(max_examples=200, deadline=None)
@given(TEXTS, DIALECTS, st.sampled_from(["stop", "length"]))
def test_calls_of_any_text_are_in_order_and_parse(parts, dialect, reason):
    events, finish_reason = read(["".join(parts)], reason, dialect=dialect)
    open_index, arguments, num_whole, num_calls = None, "", 0, 0
    for event in events:
        if isinstance(event, CallBegun):
            assert open_index is None
            assert (event.index, event.id) == (num_calls, f"call_{num_calls}")
            open_index, arguments = event.index, ""
        elif isinstance(event, Arguments):
            assert event.index == open_index
            assert event.text
            arguments += event.text
        elif isinstance(event, CallEnded):
            assert event.index == open_index
            assert _is_object(arguments) == event.is_whole
            num_whole += event.is_whole
            num_calls += 1
            open_index = None
        else:
            assert open_index is None
            assert event.text
    assert open_index is None
    assert finish_reason == ("tool_calls" if num_whole and reason == "stop" else reason)


def _refuse(constant):
    raise ValueError(constant)


def _is_object(text):
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except ValueError:
        return False


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.sampled_from(["</tool_call>", "<tool_call>", "</parameter"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
OBJECTS = st.dictionaries(st.text(max_size=6), VALUES, max_size=4)


@given(OBJECTS, st.text(min_size=1), st.booleans(), st.sampled_from([None, 2]), SIZES)
def test_any_arguments_come_back(arguments, name, is_ascii, indent, sizes):
    written = json.dumps(arguments, ensure_ascii=is_ascii, indent=indent)
    member = json.dumps(name, ensure_ascii=is_ascii)
    text = f'<tool_call>\n{{"name": {member}, "arguments": {written}}}\n</tool_call>'
    assert read(pieces_of(text, sizes)) == (call(0, name, written), "tool_calls")


NAMES = st.text(st.characters(exclude_characters="<>\n"), min_size=1, max_size=20)


@given(NAMES, st.dictionaries(NAMES, st.text(), max_size=3), SIZES)
def test_any_coder_texts_come_back(name, texts, sizes):
    texts = {key: text.replace("</parameter>", "") for key, text in texts.items()}
    events, reason = read(
        pieces_of(coder(f"x{name}", *texts.items()), sizes), dialect="qwen3_coder"
    )
    assert reason == "tool_calls"
    assert events[0] == CallBegun(0, "call_0", f"x{name}")
    assert json.loads(events[1].text) == texts


CHANGES = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.integers(0, 1),
        st.sampled_from('{}[]",:-+.0123eE\\u/ tnfalsr\n\x01'),
    ),
    max_size=4,
)


def follow(pieces):
    """The mark at which an object's text ends; BROKEN if text follows the object."""
    followed, mark = JSONObject(), Mark.MORE
    for piece in pieces:
        if mark is Mark.END:
            return Mark.BROKEN
        position = 0
        while position < len(piece):
            position, mark = followed.advance(piece, position)
            if mark is Mark.BROKEN or (mark is Mark.END and position < len(piece)):
                return Mark.BROKEN
    return mark


@settings(max_examples=200, deadline=None)
@given(OBJECTS.map(json.dumps), CHANGES, SIZES)
def test_an_object_ends_exactly_where_python_s_parser_finds_one(text, changes, sizes):
    for number, num_left_out, char in changes:
        place = number % len(text)
        text = text[:place] + char + text[place + num_left_out :]
    text = text.rstrip()
    assert (follow(pieces_of(text, sizes)) is Mark.END) == _is_object(text)


# The choice of the parsers


def test_parsers_are_chosen_by_the_chat_template():
    hermes, coder_class = TOOL_CALL_PARSERS["hermes"], TOOL_CALL_PARSERS["qwen3_coder"]
    qwen3 = '{% if x %}<think>\n\n</think>{% endif %}<tool_call>\n{"name": …}\n</tool_call>'
    assert reasoning_parser(None, qwen3) is REASONING_PARSERS["qwen3"]
    assert tool_call_parser(None, qwen3) is hermes
    assert tool_call_parser(None, "<tool_call>\n<function=' + name + '>") is coder_class
    for template in (None, "", "{{ messages }}"):
        assert reasoning_parser(None, template) is None
        assert tool_call_parser(None, template) is None
    assert tool_call_parser("qwen3_coder", qwen3) is coder_class
    assert reasoning_parser("qwen3", None) is REASONING_PARSERS["qwen3"]


def test_an_unknown_parser_is_named_with_those_that_exist():
    with pytest.raises(
        ValueError, match="tool_call_parser is 'x': it must be one of hermes, qwen3"
    ):
        tool_call_parser("x", None)
    with pytest.raises(ValueError, match="reasoning_parser is 'r1': it must be one of qwen3"):
        reasoning_parser("r1", None)
