"""Grammars that force JSON or calls: llguidance takes the texts that fit, and no others."""

import json

import pytest
from nv_api import StructuredOutputsParams
from nv_api.said import TOOL_CALL_PARSERS, CallEnded, Content, Function, Place, Speech, ToolCalls
from nv_api.said.forms import (
    ANY_OBJECT,
    MAX_SPACE,
    Tags,
    calls_form,
    choice_form,
    either,
    grammar,
    json_form,
    lark_form,
    one_call_form,
    regex_form,
)
from nv_api.structured import Grammars
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END = "<|im_end|>"
SPACES = " " * MAX_SPACE
FUNCTIONS = [
    Function(
        "weather",
        {
            "type": "object",
            "properties": {
                "city": {"$ref": "#/$defs/City"},
                "days": {"type": "integer", "maximum": 14},
                "unit": {"enum": ["C", "F"]},
                "is_dry": {"type": "boolean"},
                "when": {"type": ["string", "null"], "format": "a format of our own"},
                "at": {"$ref": "#/$defs/Place"},
                "scale": {"$ref": "#/$defs/Scale"},
            },
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {
                "City": {"type": "string", "description": "write name ::= value\nstart: x"},
                "Scale": {"enum": ["a/b", "c"]},
                "Place": {
                    "type": "object",
                    "properties": {"x": {"type": "number"}},
                    "additionalProperties": False,
                },
            },
        },
    ),
    Function("now"),
    Function('sa"y\\', {"type": "object"}),
]
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CODER_OSLO = "<tool_call>\n<function=weather>\n<parameter=city>\nOs\n<lo>\n</parameter>\n"
CODER_REST = (
    "<parameter=days>\n3\n</parameter>\n<parameter=unit>\nC\n</parameter>\n"
    "<parameter=is_dry>\ntrue\n</parameter>\n<parameter=when>\nnoon\n</parameter>\n"
    '<parameter=at>\n{"x": 1.5}\n</parameter>\n<parameter=scale>\na/b\n</parameter>\n'
)
CODER_END = "</function>\n</tool_call>"
CODER_NOW = "<tool_call>\n<function=now>\n" + CODER_END


def bytewise(tags):
    """A tokenizer of bytes, in which each of some tags is one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


class Tokenized:
    """A tokenizer, its grammars, and its tags."""

    def __init__(self, tags):
        self._tokenizer = bytewise(tags)
        self._end = self._tokenizer.eos_token_id
        self._grammars = Grammars(self._tokenizer, len(self._tokenizer), [self._end])
        self.tags = Tags(self._tokenizer.get_added_vocab())

    def fits(self, text, form, place=Place.AFTER):
        """Whether masks allow each token of a text, and then the end."""
        asked = StructuredOutputsParams(grammar=grammar(form, place, self.tags))
        matcher = self._grammars.compile(asked).matcher(frozenset([self._end]))
        ids = self._tokenizer(text, add_special_tokens=False).input_ids
        for token in [*ids, self._end]:
            if not matcher.mask(())[token // 8] >> token % 8 & 1:
                return False
            assert matcher.accept([token]) is None
        return True


@pytest.fixture(scope="module", params=[TAGS, ()], ids=["tags are tokens", "tags are text"])
def tokenized(request):
    return Tokenized(request.param)


def calls(tokenized, dialect="hermes", **options):
    return calls_form(TOOL_CALL_PARSERS[dialect], FUNCTIONS, tokenized.tags, **options)


def test_s12_json_has_at_most_eight_spaces_in_a_row(tokenized):
    form = json_form()
    for text in ("{}", '{"a": [1, {"b": null}], "c": "' + SPACES * 2 + '"}'):
        assert tokenized.fits(text, form)
        assert tokenized.fits(text.replace("{", "{" + SPACES).replace(":", SPACES + ":"), form)
    for text in ('{%s"a":1}', '{"a"%s:1}', '{"a":%s1}', '{"a":1%s}', '{"a":[%s]}', '{"a":[1%s,2]}'):
        assert tokenized.fits(text % SPACES, form)
        assert tokenized.fits(text % (SPACES[:4] + "\n\t\r "), form)
        assert not tokenized.fits(text % (SPACES + " "), form)
        assert not tokenized.fits(text % (SPACES + "\n"), form)
    for text in ("", "[]", "1", "{", "{} ", "a{}"):
        assert not tokenized.fits(text, form)


def test_json_of_a_schema(tokenized):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = json_form(schema | {"x-guidance": {"whitespace_pattern": " *"}})
    assert tokenized.fits('{ "a" : 1 }', form)
    for text in ("{}", '{"a": "1"}', f'{{"a":{SPACES} 1}}'):
        assert not tokenized.fits(text, form)
    for schema in ({"type": "nosuch"}, {"type": "object", "nosuch": {}, "not": {}}):
        with pytest.raises(ValueError, match=r"structured_outputs\.grammar"):
            tokenized.fits("{}", json_form(schema))
    with pytest.raises(ValueError, match="which is not JSON"):
        json_form({"const": float("nan")})


@pytest.mark.parametrize("form", ["json", "hermes", "qwen3_coder"])
def test_s18_free_thoughts_come_before_the_form(tokenized, form):
    if form == "json":
        asked, text = json_form(ANY_OBJECT), '{"a": 1}'
    else:
        asked = calls(tokenized, form)
        text = NOW if form == "hermes" else CODER_NOW
    thought = 'hm {"a": <b>\n "é" </thin\n'
    for place in (Place.OPENED, Place.INSIDE):
        for space in ("", "\n\n", "\n" * MAX_SPACE):
            assert tokenized.fits(f"{thought}</think>{space}{text}", asked, place)
        assert tokenized.fits(f"</think>{text}", asked, place)
        assert not tokenized.fits(text, asked, place)
        assert not tokenized.fits(thought, asked, place)
        assert not tokenized.fits(f"{thought}</think>", asked, place)
        assert not tokenized.fits(f"{thought}</think>\nSo {text}", asked, place)
        for space in (" ", "\v", "\n" * (MAX_SPACE + 1)):
            assert not tokenized.fits(f"{thought}</think>{space}{text}", asked, place)
    for opening in ("<think>", "\n<think>"):
        assert tokenized.fits(f"{opening}{thought}</think>\n{text}", asked, Place.BEFORE)
        assert not tokenized.fits(f"{opening}{text}", asked, Place.BEFORE)
    assert tokenized.fits(text, asked, Place.BEFORE)
    assert not tokenized.fits(f"hm {text}", asked, Place.BEFORE)
    assert tokenized.fits(text, asked, Place.AFTER)
    assert not tokenized.fits(f"<think>{thought}</think>{text}", asked, Place.AFTER)


def test_s16_required_calls_of_hermes(tokenized):
    form, one = calls(tokenized), calls(tokenized, num_calls="")
    odd = OSLO.replace("weather", 'sa\\"y\\\\').replace("Oslo", "é 😀 \\n")
    full = OSLO.replace('"Oslo"', '"Oslo", "days" : 14, "unit":"F", "at": {"x": 1}')
    for text in (OSLO, NOW, odd, full):
        assert tokenized.fits(text, form)
        assert tokenized.fits(text, one)
        assert tokenized.fits(f"{text}\n{NOW}\n{text}", form)
        assert not tokenized.fits(f"{text}\n{NOW}", one)
    for text in (
        "",
        f"see {OSLO}",
        f"{OSLO} so",
        OSLO.removesuffix("</tool_call>"),
        OSLO.replace("weather", "weathers"),
        OSLO.replace("city", "town"),
        OSLO.replace('"Oslo"', "3"),
        OSLO.replace('"Oslo"', '"Oslo", "days": 15'),
        OSLO.replace('"Oslo"', f'{SPACES} "Oslo"'),
        OSLO.replace('{"city": "Oslo"}', "{}"),
        NOW.replace("{}", '{"a": 1}'),
    ):
        assert not tokenized.fits(text, form), text


def test_s16_required_calls_of_qwen3_coder(tokenized):
    form, one = calls(tokenized, "qwen3_coder"), calls(tokenized, "qwen3_coder", num_calls="")
    for text in (CODER_OSLO + CODER_END, CODER_OSLO + CODER_REST + CODER_END, CODER_NOW):
        assert tokenized.fits(text, form)
        assert tokenized.fits(text, one)
        assert tokenized.fits(f"{text}\n{CODER_NOW}", form)
        assert not tokenized.fits(f"{text}\n{CODER_NOW}", one)
    full = CODER_OSLO + CODER_REST + CODER_END
    for old, new in (
        ("\nC\n", "\nD\n"),
        ("\na/b\n", "\na/c\n"),
        ("\n3\n", "\n15\n"),
        ("\n3\n", "\nthree\n"),
        ("\ntrue\n", "\nyes\n"),
        ("weather", "rain"),
        ("=days", "=hours"),
        ('{"x": 1.5}', '{"y": 1.5}'),
        (CODER_END, "</function>\n"),
    ):
        assert not tokenized.fits(full.replace(old, new), form), new
    assert not tokenized.fits("<tool_call>\n<function=weather>\n" + CODER_END, form)


def test_s16_a_named_function(tokenized):
    form = calls_form(TOOL_CALL_PARSERS["hermes"], FUNCTIONS[1:2], tokenized.tags, num_calls="")
    assert tokenized.fits(NOW, form)
    assert not tokenized.fits(OSLO, form)
    assert not tokenized.fits(f"{NOW}\n{NOW}", form)


@pytest.mark.parametrize("dialect", TOOL_CALL_PARSERS)
def test_free_text_with_at_most_one_call(tokenized, dialect):
    form = one_call_form(TOOL_CALL_PARSERS[dialect], FUNCTIONS, tokenized.tags)
    call = NOW if dialect == "hermes" else CODER_NOW
    for text in ("", "Yes <b>, {}\n", "a <tool_cal", call, f"Let me see.\n\n{call}"):
        assert tokenized.fits(text, form), text
    for text in (f"{call}\n{call}", f"{call} so", "<tool_call>", "a <tool_call>\n{"):
        assert not tokenized.fits(text, form), text
    thought = f"<think>\nhm\n</think>\n\nSo.\n{call}"
    assert tokenized.fits(thought, form, Place.BEFORE)
    assert not tokenized.fits(f"{thought}\n{call}", form, Place.BEFORE)


@pytest.mark.parametrize(
    ("form", "fitting", "others"),
    [
        (regex_form("a/b\\/[/c]\n\\\\"), ["a/b//\n\\", "a/b/c\n\\"], ["a/b/d\n\\", "", "a"]),
        (regex_form(""), [""], ["a"]),
        (choice_form(["yes", 'n"o/', "yes, so"]), ["yes", 'n"o/', "yes, so"], ["", "yes,", "n"]),
        (lark_form('start: "a" x\nx: "}" | %json {"type": "null"}'), ["a}", "anull"], ["a", "}"]),
        (json_form(ANY_OBJECT, 0), ['{"a":1}'], ['{"a": 1}', "{ }"]),
        (either(json_form(), choice_form(["no"])), ["{}", "no"], ["", "no{}"]),
    ],
    ids=["regex", "empty regex", "choice", "lark", "compact", "either"],
)
def test_other_forms_after_a_thought(tokenized, form, fitting, others):
    for place, thought in (Place.AFTER, ""), (Place.BEFORE, "<think>hm</think>\n"):
        for text in fitting:
            assert tokenized.fits(thought + text, form, place), text
        for text in others:
            assert not tokenized.fits(thought + text, form, place), text


@pytest.mark.parametrize("text", [OSLO, f"{NOW}\n{OSLO}", CODER_OSLO + CODER_REST + CODER_END])
def test_the_parsers_read_forced_calls(text):
    dialect = TOOL_CALL_PARSERS["qwen3_coder" if "<function=" in text else "hermes"]
    speech = Speech(None, ToolCalls(dialect, FUNCTIONS))
    events = [*speech.push(text), *speech.finish("stop").events]
    assert not any(isinstance(event, Content) for event in events)
    ended = [event for event in events if isinstance(event, CallEnded)]
    assert len(ended) == text.count("</tool_call>")
    assert all(event.is_whole for event in ended)


def test_a_grammar_is_a_few_times_its_schemas():
    """Not the number of functions squared, for example: 64 KiB are allowed."""
    form = calls_form(TOOL_CALL_PARSERS["hermes"], FUNCTIONS * 20, Tags())
    schemas = sum(len(json.dumps(function.parameters)) for function in FUNCTIONS * 20)
    assert len(grammar(form, Place.BEFORE, Tags())) < 3 * schemas
