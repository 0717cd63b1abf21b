"""Structured outputs of a random model: each has the form that was requested, in any company."""

import json
import re
import sys

import pytest
import torch
from nv_api import LLM, SamplingParams, StructuredOutputsParams, structured
from nv_api.structured import Grammars

EOS = 256
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
EBNF = """root ::= number ("+" number){1,2}
number ::= [0-9]{1,3}
"""
LARK = 'start: WORD ("," WORD)? \nWORD: /[xyz]{2,3}/\n'
CHOICES = ["yes", "no", 'a "quoted" \\ one', "two\nlines", "é😀日本"]


def is_person(text):
    person = json.loads(text)
    assert person.keys() <= PERSON["properties"].keys()
    assert re.fullmatch("[a-z]{1,8}", person["name"])
    assert 0 <= person["age"] <= 120
    assert set(person.get("tags", ())) <= {"red", "blue"}
    return len(person.get("tags", ())) <= 2


ASKED = {
    "json": ({"json": PERSON, "disable_any_whitespace": True}, is_person),
    "regex": ({"regex": "[ab]{3}-[0-9]{2,4}(é|ü)?"}, "[ab]{3}-[0-9]{2,4}(é|ü)?"),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "ebnf": ({"grammar": EBNF}, r"[0-9]{1,3}(\+[0-9]{1,3}){1,2}"),
    "lark": ({"grammar": LARK}, "[xyz]{2,3}(,[xyz]{2,3})?"),
}


def asked(kind, **more):
    return SamplingParams(
        max_tokens=100, structured_outputs=StructuredOutputsParams(**ASKED[kind][0]), **more
    )


def check(kind, completion):
    """It ended because the grammar did, and what it says is of the grammar."""
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None), completion
    assert completion.token_ids[-1] == EOS
    fits = ASKED[kind][1]
    assert re.fullmatch(fits, completion.text) if isinstance(fits, str) else fits(completion.text)


@pytest.fixture(scope="module")
def start(checkpoint):
    torch.set_num_threads(1)
    defaults = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 256}
    return lambda **options: LLM(checkpoint, **defaults | options)


@pytest.fixture(scope="module")
def llm(start):
    with start() as llm:
        yield llm


def run(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


MIXED = [*ASKED, None] * 3


def mixed():
    """Every kind, and plain rows between them; seeds of their own."""
    return [
        SamplingParams(max_tokens=30, ignore_eos=True, seed=i)
        if kind is None
        else asked(kind, seed=i, n=1 + i % 2)
        for i, kind in enumerate(MIXED)
    ]


@pytest.fixture(scope="module")
def alone(llm):
    """The answers of the mixed requests, each alone."""
    return [run(llm, f"prompt {i}", params)[0].outputs for i, params in enumerate(mixed())]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"num_kvcache_blocks": 8}, {"max_burst": 4}])
def test_every_kind_beside_plain_rows(start, alone, depth, options):
    prompts = [f"prompt {i}" for i in range(len(MIXED))]
    with start(max_in_flight=depth, **options) as llm:
        outputs = run(llm, prompts, mixed())
        metrics = llm.get_metrics()
    for kind, output, single in zip(MIXED, outputs, alone, strict=True):
        for completion in output.outputs:
            if kind is not None:
                check(kind, completion)
        assert output.outputs == single
    assert metrics["num_free_blocks"] == metrics["num_blocks"]
    if "num_kvcache_blocks" in options:
        assert metrics["num_preemptions"] > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_others_do_not_wait_for_a_grammar(start, depth):
    """A plain row gains a token in every step; beside it, one with a grammar in every depth + 1."""
    with start(max_in_flight=depth) as llm:
        plain = llm.add_request("a", SamplingParams(max_tokens=30, ignore_eos=True))
        digits = StructuredOutputsParams(regex="[0-9]{40}")
        bound = llm.add_request("b", SamplingParams(max_tokens=30, structured_outputs=digits))
        ended, num_steps = {}, 0
        while not llm.is_finished():
            num_steps += 1
            ended |= {request_id: num_steps for request_id, _ in llm.step()[0]}
    assert ended[plain] == 30 + depth
    assert 30 * 2 <= ended[bound] <= 30 * (depth + 1)


def test_an_interrupted_grammar_goes_on_where_it_was(start, alone, monkeypatch):
    with start(max_in_flight=2) as llm:
        ids = [llm.add_request(f"prompt {i}", params) for i, params in enumerate(mixed())]
        submit, count = llm._session._engine.executor.submit, iter(range(1000))

        def interrupted(batch):
            if next(count) in (5, 6, 11):
                raise KeyboardInterrupt
            return submit(batch)

        monkeypatch.setattr(llm._session._engine.executor, "submit", interrupted)
        found, num_interrupts = {request_id: [] for request_id in ids}, 0
        while not llm.is_finished():
            try:
                for request_id, token_ids in llm.step()[0]:
                    found[request_id].append(token_ids)
            except KeyboardInterrupt:
                num_interrupts += 1
    assert num_interrupts == 3
    expected = [sorted(completion.token_ids for completion in outputs) for outputs in alone]
    assert [sorted(found[request_id]) for request_id in ids] == expected


def test_max_tokens_cuts_and_the_beginning_fits(llm):
    params = asked("json", seed=3, n=2)
    (whole,) = run(llm, "x", params)
    params.max_tokens = 7
    (cut,) = run(llm, "x", params)
    for full, part in zip(whole.outputs, cut.outputs, strict=True):
        assert part.finish_reason == "length"
        assert part.token_ids == full.token_ids[:7]
        assert part.text.startswith('{"name":'[: len(part.text)])


def test_eos_ends_only_where_the_grammar_may(llm):
    params = asked("regex", logit_bias={EOS: 100.0})  # as soon as it may
    assert all(
        len(completion.text) == 6 for o in run(llm, ["a"] * 4, params) for completion in o.outputs
    )
    check("regex", run(llm, "a", params)[0].outputs[0])


def test_min_tokens_and_ignore_eos_hold_as_long_as_the_grammar_has_more(llm):
    digits = StructuredOutputsParams(regex="[0-9]{1,6}")
    eager = {"logit_bias": {EOS: 100.0}, "structured_outputs": digits, "max_tokens": 20}
    lengths = [
        len(run(llm, "a", SamplingParams(**eager, **more))[0].outputs[0].token_ids)
        for more in ({}, {"min_tokens": 4}, {"min_tokens": 15}, {"ignore_eos": True})
    ]
    assert lengths == [2, 5, 7, 7]  # EOS among them


def test_stop_strings_end_it_earlier(llm):
    digits = StructuredOutputsParams(regex="[0-9]{50}")
    params = SamplingParams(max_tokens=99, stop="5", structured_outputs=digits, seed=1)
    (by_text,) = run(llm, "a", params)
    assert by_text.outputs[0].stop_reason == "5"
    assert re.fullmatch("[0-46-9]*", by_text["text"])


def test_b25_a_stop_token_comes_only_where_the_grammar_may_end(llm):
    (five,) = llm.tokenizer.encode("5")
    eager = {"logit_bias": {five: 100.0}, "stop_token_ids": [five], "max_tokens": 99}

    def ended(regex, **more):
        asked = StructuredOutputsParams(regex=regex)
        (output,) = run(llm, "a", SamplingParams(structured_outputs=asked, **eager | more))
        return output.outputs[0]

    whole = ended("[0-9]{50}")
    assert re.fullmatch("[0-46-9]{50}", whole.text)
    assert (whole.finish_reason, whole.stop_reason) == ("stop", five)
    shorter = ended("[0-9]{3,50}")
    assert re.fullmatch("[0-46-9]{3}", shorter.text)
    assert (shorter.finish_reason, shorter.stop_reason) == ("stop", five)
    later = ended("[0-9]{3,50}", min_tokens=9)
    assert re.fullmatch("[0-46-9]{9}", later.text)
    cut = ended("[0-9]{50}", max_tokens=20)
    assert (len(cut.text), cut.finish_reason) == (20, "length")
    assert re.fullmatch("[0-46-9]{50}", ended("[0-9]{50}", ignore_eos=True).text)


def test_b25_where_only_a_stop_token_fits_it_is_an_error(llm):
    five = llm.tokenizer.encode("5")
    asked = StructuredOutputsParams(regex="a5b")
    with pytest.warns(UserWarning, match="take it out of stop_token_ids"):
        (output,) = run(llm, "a", SamplingParams(stop_token_ids=five, structured_outputs=asked))
    assert output.outputs[0].finish_reason == "error"
    forced = SamplingParams(
        allowed_token_ids=five,
        stop_token_ids=five,
        structured_outputs=StructuredOutputsParams(regex="[0-9]{4}"),
    )
    with pytest.warns(UserWarning, match="structured_outputs"):
        (output,) = run(llm, "a", forced)
    assert output.outputs[0].finish_reason == "error"


def test_b25_a_special_token_that_the_grammar_names_may_end_it(sentence_piece):
    def mask(end):
        grammar = StructuredOutputsParams(grammar='start: "a" </s> | "a" <s> "b"')
        matcher = Grammars(sentence_piece, 300, [2]).compile(grammar).matcher(frozenset({end}))
        assert matcher.accept(sentence_piece.convert_tokens_to_ids(["<0x61>"])) is None
        return int.from_bytes(matcher.mask(()), "little")

    assert mask(2) >> 2 & 1  # </s>, the last
    assert not mask(1) >> 1 & 1  # <s>, in the middle


@pytest.mark.parametrize(
    ("grammar", "text", "num_tokens"),
    [
        ("start: <|endoftext|>", "", 1),
        ('start: "a" <|endoftext|>', "a", 2),
        (f'start: "a" <[{EOS}]>', "a", 2),
        ('start: <|im_start|> "a"', "a", 3),
    ],
)
def test_16_a_grammar_may_name_the_eos_as_its_end(llm, grammar, text, num_tokens):
    asked = StructuredOutputsParams(grammar=grammar)
    (output,) = run(llm, "a", SamplingParams(max_tokens=5, structured_outputs=asked))
    (completion,) = output.outputs
    assert (completion.text, completion.finish_reason) == (text, "stop")
    assert len(completion.token_ids) == num_tokens
    assert completion.token_ids[-1] == EOS


def test_16_an_eos_in_the_middle_of_a_grammar_is_named(llm):
    asked = StructuredOutputsParams(grammar='start: "a" <|endoftext|> "b"')
    with pytest.warns(UserWarning, match="EOS out of the middle of the grammar"):
        (output,) = run(llm, "a", SamplingParams(max_tokens=5, structured_outputs=asked))
    assert output.outputs[0].finish_reason == "error"


@pytest.mark.parametrize("num_choices", [1999, 2000, 20000])
def test_b14_thousands_of_choices(llm, num_choices):
    choices = [f"item {i}" for i in range(num_choices)]
    asked = StructuredOutputsParams(choice=choices)
    (output,) = run(llm, "a", SamplingParams(max_tokens=20, structured_outputs=asked))
    assert output["text"] in choices
    assert output.outputs[0].finish_reason == "stop"


SPECIAL = [
    "a",
    "ab",
    "ab",
    "a|b",
    "(",
    "[x]",
    "\\",
    "a/b",
    "^$",
    "a.b*",
    "#&~-",
    "\n\t",
    "é😀",
    "\x00",
]


@pytest.fixture(scope="module")
def special(llm):
    grammars = Grammars(llm.tokenizer, len(llm.tokenizer), [EOS])
    return grammars.compile(StructuredOutputsParams(choice=SPECIAL))


@pytest.mark.parametrize("choice", SPECIAL)
def test_b14_a_choice_is_that_text_alone(llm, special, choice):
    matcher = special.matcher(frozenset({EOS}))
    ids = llm.tokenizer.encode(choice)
    assert matcher.accept([*ids, EOS]) is None
    matcher.reset()
    assert matcher.accept([*ids, *ids]) is not None


def test_b14_long_alternations_of_a_grammar_work_or_are_refused(llm):
    texts = " | ".join(f'"item {i}"' for i in range(2100))
    for grammar in (f"root ::= {texts}", f"start: A\nA: {texts}"):
        asked = StructuredOutputsParams(grammar=grammar)
        (output,) = run(llm, "a", SamplingParams(max_tokens=20, structured_outputs=asked))
        assert re.fullmatch("item [0-9]+", output["text"])
        assert output.outputs[0].finish_reason == "stop"
    asked = StructuredOutputsParams(grammar=f"start: {texts}")
    with pytest.raises(ValueError, match=r"2000 continuations.*name is in capitals"):
        llm.add_request("a", SamplingParams(structured_outputs=asked))


DOUBLING = "".join(f"E{i}: E{i + 1} E{i + 1}\n" for i in range(25)) + 'E25: "a"\nstart: E0'


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grammar": 'start[temperature=0.5]: "a"'}, "temperature of its own, .*: leave it out"),
        ({"grammar": "start: <[999999]>"}, "names a token id past the vocabulary: give a smaller"),
        ({"regex": "(?=a)b"}, "look-around, including"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": r"\bfoo"}, "anchors inside are not supported"),
        ({"regex": "a\\"}, "ends in a single backslash"),
        ({"json": {"properties": {"a": {"pattern": "a\\"}}}}, "ends in a single backslash"),
        ({"json": {"patternProperties": {"a\\": {}}}}, "ends in a single backslash"),
        ({"json": {"maxLength": 10**10, "type": "string"}}, "a number of repeats is too large"),
        ({"regex": r"[^\s\S]"}, "no text fits"),
        ({"json": {"$ref": "#"}}, "no text fits"),
        ({"json": {"$ref": "http://a.b/c.json"}}, r"put that under \$defs"),
        ({"json": {"enum": []}}, "anyOf is empty"),
        ({"json": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "use anyOf"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "incompatible types"),
        ({"json": {"if": {}, "then": {}}}, 'uses "if", "then", which .*: leave it out'),
        ({"json": {"not": {"type": "null"}}}, 'uses "not", which .*: leave it out'),
        ({"json": {"type": "string", "format": "x"}}, "has the format 'x', .*: give a pattern"),
        ({"regex": "(" * 3000 + "a" + ")" * 3000}, "more than 250 groups open"),
        ({"grammar": "root ::= " + "(" * 29 + '"a"' + ")" * 29}, "more than 28 groups"),
        ({"grammar": "start: a\na: a"}, "no text fits"),
        ({"grammar": 'start: "a"\nx'}, "line 2, column 2: "),
        ({"grammar": "start: " + "(" * 500 + '"a"' + ")" * 500}, "more than 28 groups"),
        ({"grammar": "start: " + " ".join(f'"a{i}"?' for i in range(3000))}, "continuations"),
        ({"grammar": DOUBLING}, "give smaller or fewer"),
    ],
)  # fmt: skip
def test_what_llguidance_refuses_is_one_sentence_at_admission(llm, fields, message):
    with pytest.raises(ValueError, match=rf"structured_outputs\.\w+ is .*: .*{message}") as error:
        llm.add_request("a", SamplingParams(structured_outputs=StructuredOutputsParams(**fields)))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000
    assert llm.is_finished()


def test_f10_an_error_shows_the_value_and_no_place_in_a_translation(llm):
    asked = StructuredOutputsParams(grammar="root ::= " + "(" * 3000 + '"a"' + ")" * 3000)
    with pytest.raises(ValueError, match=r"grammar is 'root ::= \(\(\(") as error:
        llm.add_request("a", SamplingParams(structured_outputs=asked))
    assert "line" not in str(error.value)
    nested = "root ::= " + "(" * 28 + '"b"{1}' + ")" * 28
    for grammar in (nested, '\ufeffroot ::= "a"{0} "b"'):
        asked = StructuredOutputsParams(grammar=grammar)
        (output,) = run(llm, "a", SamplingParams(max_tokens=3, structured_outputs=asked))
        assert output["text"] == "b"


def test_thousands_of_rules_that_name_the_next_do_not_end_the_process(llm):
    chain = "\n".join(f"r{i}: 'a' r{i + 1}".replace("'", '"') for i in range(3500))
    refs = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(4000)} | {"a4000": {"const": 1}}
    for fields in (
        {"grammar": f'start: r0\n{chain}\nr3500: "b"'},
        {"json": {"$ref": "#/$defs/a0", "$defs": refs}},
    ):
        asked = StructuredOutputsParams(**fields)
        (output,) = run(llm, "a", SamplingParams(max_tokens=3, structured_outputs=asked))
        assert output.outputs[0].finish_reason in ("stop", "length")


def test_a_compile_past_its_deadline_is_refused_and_holds_no_other(llm, monkeypatch):
    monkeypatch.setattr("nv_api.structured.COMPILE_SECONDS", 0.05)
    pattern = " & ".join(f"/.*{i}.*/" for i in range(60))
    asked = StructuredOutputsParams(grammar=f"start: X\nX: {pattern}")
    with pytest.raises(ValueError, match=r"takes more than 0\.05 s to compile"):
        llm.add_request("a", SamplingParams(structured_outputs=asked))
    assert llm.is_finished()


def test_a_mask_that_costs_too_much_ends_its_request_alone(llm, monkeypatch):
    ambiguous = StructuredOutputsParams(grammar='start: e\ne: e e e | e e | "a" |\n')
    params = [
        SamplingParams(max_tokens=50, structured_outputs=ambiguous),
        SamplingParams(max_tokens=20, ignore_eos=True),
    ]
    monkeypatch.setattr("nv_api.structured.MASK_SECONDS", 0.0)
    with pytest.warns(UserWarning, match="of the host, and 0 s are allowed"):
        slow, plain = run(llm, ["a", "b"], params)
    assert slow.outputs[0].finish_reason == "error"
    assert (len(plain["token_ids"]), plain.outputs[0].finish_reason) == (20, "length")


def test_16_masks_that_together_cost_too_much_end_their_request_alone(llm, monkeypatch):
    monkeypatch.setattr("nv_api.structured.REQUEST_SECONDS", 0.05)
    repeats = StructuredOutputsParams(grammar='root ::= x{300}\nx ::= y{300}\ny ::= "a"')
    params = [
        SamplingParams(max_tokens=60, structured_outputs=repeats),
        SamplingParams(max_tokens=20, ignore_eos=True),
    ]
    monkeypatch.setattr("nv_api.structured.TOKEN_SECONDS", 0.0)
    with pytest.warns(UserWarning, match=r"tokens cost 0\.\d\d s of the host, and 0\.05 s are all"):
        slow, plain = run(llm, ["a", "b"], params)
    assert slow.outputs[0].finish_reason == "error"
    assert (len(plain["token_ids"]), plain.outputs[0].finish_reason) == (20, "length")


class Clock:
    """Every piece of work takes a hundredth of a second."""

    def __init__(self):
        self.seconds = 0.0

    def thread_time(self):
        self.seconds += 0.01
        return self.seconds


def test_16_the_completions_of_a_request_share_the_time_of_its_grammar(llm, monkeypatch):
    monkeypatch.setattr("nv_api.structured.REQUEST_SECONDS", 0.4)
    monkeypatch.setattr("nv_api.structured.TOKEN_SECONDS", 0.0)
    monkeypatch.setattr("nv_api.structured.time", Clock())
    letters = StructuredOutputsParams(regex="[ab]{100}")
    params = [
        SamplingParams(n=8, max_tokens=30, structured_outputs=letters),
        SamplingParams(max_tokens=12, structured_outputs=letters),
        SamplingParams(max_tokens=20, ignore_eos=True),
    ]
    with pytest.warns(UserWarning, match=r"tokens cost 0\.4\d s of the host, and 0\.40 s are all"):
        many, one, plain = run(llm, ["a", "b", "c"], params)
    assert {each.finish_reason for each in many.outputs} == {"error"}
    assert sum(len(each.token_ids) for each in many.outputs) <= 20
    for other, count in ((one, 12), (plain, 20)):
        assert (len(other["token_ids"]), other.outputs[0].finish_reason) == (count, "length")


def test_16_completions_that_wait_hold_no_copy_of_their_grammar(llm, monkeypatch):
    made = []
    matcher = structured.CompiledGrammar.matcher
    monkeypatch.setattr(
        structured.CompiledGrammar,
        "matcher",
        lambda self, ends: made.append(matcher(self, ends)) or made[-1],
    )
    letters = StructuredOutputsParams(regex="[ab]{3}")
    request = llm.add_request("a", SamplingParams(n=64, structured_outputs=letters))
    assert [each._copy for each in made] == [None] * 64
    llm.step()
    assert any(each._copy for each in made)
    llm.abort_request(request)


def test_what_fails_midway_is_one_sentence(llm):
    dead_end = StructuredOutputsParams(grammar='start: "a" X\nX: /[^\\s\\S]/')
    with pytest.warns(UserWarning, match="no text fits"):
        (output,) = run(llm, "a", SamplingParams(structured_outputs=dead_end))
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].stop_reason == "structured_outputs: no text fits from here on"


def test_equal_grammars_of_a_list_are_compiled_once(llm, monkeypatch):
    sources = []
    start = structured._start
    monkeypatch.setattr(
        structured,
        "_start",
        lambda tokenizer, source: sources.append(source) or start(tokenizer, source),
    )
    schemas = [{"type": "string", "maxLength": 1 + i % 2} for i in range(8)]
    params = [
        SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(json=schema))
        for schema in schemas
    ]
    run(llm, ["a"] * 8, params)
    assert len(sources) == 2


LETTER = "[a-c]"


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (f"start: /{LETTER}/", LETTER),
        (f"?start: /{LETTER}/", LETTER),
        (f"!start: /{LETTER}/", LETTER),
        (f"?!start.2: /{LETTER}/", LETTER),
        (f"start.-1: X\nX.3: /{LETTER}/", LETTER),
        (f"// root ::= x\n?start: /{LETTER}/", LETTER),
        (f"X: /{LETTER}/\n\n  ?start: X", LETTER),
        (f"%ignore /_/\nstart : /{LETTER}/", f"_*{LETTER}_*"),
        (f"start[capture]: /{LETTER}/", LETTER),
        ('root ::= "\\u00e9"', "é"),
        ("root ::= [\\u00e0-\\u00ff]", "[à-ÿ]"),
        ("root::=[\\U0001F600-\\U0001F601]", "[😀😁]"),
        ('root ::= "start: a" | "::="', "start: a|::="),
    ],
)
def test_b15_lark_and_gbnf_are_distinguished(llm, grammar, expected):
    asked = StructuredOutputsParams(grammar=grammar)
    (output,) = run(llm, "a", SamplingParams(max_tokens=40, structured_outputs=asked, seed=1))
    assert output.outputs[0].finish_reason == "stop", output.outputs[0].stop_reason
    assert re.fullmatch(expected, output["text"])


def test_a_control_that_forbids_all_that_fits_is_an_error_of_that_request_alone(llm):
    (other,) = llm.tokenizer.encode("z")
    params = [asked("regex", allowed_token_ids=[other]), asked("regex", seed=0)]
    with pytest.warns(UserWarning, match="structured_outputs"):
        bad, good = run(llm, ["a", "b"], params)
    assert bad.outputs[0].finish_reason == "error"
    assert bad["token_ids"] == []
    check("regex", good.outputs[0])


def test_16_a_grammar_that_bad_words_make_impossible_names_both(llm):
    params = asked("regex", bad_words=["a", "b"])
    with pytest.warns(UserWarning, match="bad_words, structured_outputs left no token to draw"):
        (bad,) = run(llm, ["a"], [params])
    assert bad.outputs[0].stop_reason.startswith("bad_words, structured_outputs left no token")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "(a"}, r"regex is '\(a'.*unclosed group"),
        ({"json": {"type": "objct"}}, "json is .*objct"),
        ({"json": {"$ref": "#/nowhere"}}, "json is .*nowhere"),
        ({"grammar": "root ::= foo"}, "grammar is 'root ::= foo'.*'foo' not found"),
        ({"grammar": "start: foo"}, "grammar is 'start: foo'.*unknown name"),
    ],
)
def test_what_is_no_grammar_is_refused_before_any_work(llm, fields, message):
    wrong = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    num_steps = llm.get_metrics()["num_steps"]
    with pytest.raises(ValueError, match=f"(?s)prompt 1: structured_outputs.{message}"):
        run(llm, ["a", "b"], [asked("choice"), wrong])
    with pytest.raises(ValueError, match=f"(?s)structured_outputs.{message}"):
        llm.add_request("a", wrong)
    assert llm.get_metrics()["num_steps"] == num_steps
    assert llm.is_finished()


def test_without_llguidance_it_is_refused_before_any_work(start, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with start() as llm:
        with pytest.raises(ImportError, match=re.escape("pip install 'nv-api[structured]'")):
            run(llm, ["a", "b"], [SamplingParams(), asked("choice")])
        assert llm.is_finished()
        assert (
            len(run(llm, "a", SamplingParams(max_tokens=3, ignore_eos=True))[0]["token_ids"]) == 3
        )


def test_without_a_tokenizer_it_is_refused(start):
    with (
        start(skip_tokenizer_init=True) as llm,
        pytest.raises(ValueError, match="needs a tokenizer"),
    ):
        llm.add_request([5], asked("choice"))


def test_a_grammar_is_compiled_once_and_speaks_in_bytes_or_pieces(sentence_piece):
    grammars = Grammars(sentence_piece, 300, [2])
    compiled = grammars.compile(StructuredOutputsParams(choice=["hello"]))
    assert grammars.compile(StructuredOutputsParams(choice=["hello"])) is compiled
    first, second = (compiled.matcher(frozenset({2})) for _ in range(2))
    (byte,) = sentence_piece.convert_tokens_to_ids(["<0x68>"])
    mask = first.mask(())
    assert len(mask) == 40
    assert mask[byte // 8] >> byte % 8 & 1
    assert first.accept([byte]) is None
    assert second.mask(()) == mask  # each has a place of its own
    assert "doesn't satisfy" in second.accept([5])
    first.reset()
    assert first.mask(()) == mask


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"choice": ["<think>"]}, "<think>"),
        ({"json": {"const": "<think>"}, "disable_any_whitespace": True}, '"<think>"'),
        ({"regex": "ok <think>[ab]{2}"}, "ok <think>(aa|ab|ba|bb)"),
        ({"choice": ["a<|im_end|>b"]}, r"a<\|im_end\|>b"),
    ],
)
def test_text_that_an_added_token_spells_is_written_in_plain_tokens(llm, fields, text):
    params = SamplingParams(
        max_tokens=40, structured_outputs=StructuredOutputsParams(**fields), temperature=1.0, seed=1
    )
    (completion,) = run(llm, "say", params)[0].outputs
    assert completion.finish_reason == "stop", completion.stop_reason
    assert re.fullmatch(text, completion.text)


@pytest.mark.parametrize("form", [{"json": PERSON}, {"json_object": True}])
def test_s12_white_space_between_json_tokens_is_bounded(llm, form):
    fond = {llm.tokenizer.encode(space)[0]: 90.0 for space in (" ", "\n", "\t")}
    ends = {llm.tokenizer.encode('"')[0]: 60.0, llm.tokenizer.encode("}")[0]: 80.0}
    params = SamplingParams(
        temperature=0, max_tokens=200, logit_bias=fond | ends,
        structured_outputs=StructuredOutputsParams(**form),
    )  # fmt: skip
    (output,) = llm.generate(["a"], params, use_tqdm=False)
    completion = output.outputs[0]
    assert max(map(len, re.findall(r"\s+", completion.text))) == 8
    assert completion.finish_reason == "stop"
    json.loads(completion.text)
