"""Masks on the device, and how a grammar is asked for."""

import pickle
import re

import pytest
import torch
from nv_engine.batch import Admission, Batch, TokenMask
from nv_engine.device.sampling_tables import SamplingTables
from nv_engine.device.slots import Slots
from nv_engine.grammar import StructuredOutputsParams
from nv_engine.params import SamplingParams
from nv_kernels.sampling.controls import allow_bits

VOCAB = 50
CPU = torch.device("cpu")


def bits(*tokens):
    packed = sum(1 << token for token in tokens)
    return packed.to_bytes(-(-VOCAB // 32) * 4, "little")


def admission(slot, **fields):
    return Admission(slot, SamplingParams(**fields), 0, 1, (3,))


def asked(slot):
    return admission(slot, structured_outputs=StructuredOutputsParams(regex="a"))


def allowed(tables, *rows):
    """Tokens that the masks leave in each row."""
    logits_RV = torch.zeros(len(rows), VOCAB)
    allow_bits(logits_RV, tables.controls.masks.rows(torch.tensor(rows)))
    return [row.nonzero().flatten().tolist() for row in logits_RV.isfinite()]


def test_every_bit_is_its_token():
    for token in range(VOCAB):
        words_1W = torch.frombuffer(bytearray(bits(token)), dtype=torch.int32)[None]
        logits_1V = torch.randn(1, VOCAB)
        before_V = logits_1V[0].clone()
        allow_bits(logits_1V, words_1W)
        assert logits_1V.isfinite().nonzero().tolist() == [[0, token]]
        assert logits_1V[0, token] == before_V[token]


def test_masks_are_kept_by_slot_and_leave_others_alone():
    tables = SamplingTables(Slots(20, 4, CPU).tables, VOCAB, (1, 2))
    everything = [*range(VOCAB)]
    assert not tables.controls.in_use
    assert tables.update(Batch((), (asked(2), admission(1))))  # a table of masks came to be
    tables.update(Batch((), masks=(TokenMask(2, bits(0, 31, 32, 49)),)))
    assert allowed(tables, 0, 1, 2, 20) == [everything, everything, [0, 31, 32, 49], everything]
    assert tables.update(Batch((), (asked(12),), masks=(TokenMask(12, bits(7)),)))  # it grew
    assert allowed(tables, 2, 12, 19) == [[0, 31, 32, 49], [7], everything]
    tables.update(Batch((), (admission(2),)))  # the slot is another sequence's
    assert allowed(tables, 2, 12) == [everything, [7]]
    assert not any(tables.controls.flags([2, 3]))
    assert tables.controls.flags([2, 12]).grammar


class Pydantic:
    """A stand-in for a model of pydantic, which this package does not need."""

    def model_json_schema(self):
        """Never called."""
        raise NotImplementedError


def nested(depth):
    """A schema with that many objects in each other."""
    schema = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "nothing: give exactly one"),
        ({"json_object": False}, "nothing"),
        ({"regex": "a", "choice": ["b"]}, "regex, choice: give exactly one"),
        ({"regex": 3}, "regex is 3"),
        ({"json_object": "yes"}, "json_object is 'yes': it must be True or False"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace is 1"),
        ({"grammar": ["root"]}, "grammar is"),
        ({"choice": []}, r"choice is \[\]"),
        ({"choice": "ab"}, "choice is 'ab'"),
        ({"choice": ["a", ""]}, "non-empty strings"),
        ({"json": "{"}, "not JSON"),
        ({"json": Pydantic}, r"must be a JSON schema, so pass Pydantic.model_json_schema\(\)$"),
        ({"json": Pydantic()}, r"so pass Pydantic.model_json_schema\(\)$"),
        ({"json": int}, "json is <class 'int'>, which is not JSON"),
        ({"regex": re.compile("a")}, "it must be a string, its .pattern$"),
        ({"json": {"enum": {3}}}, "not JSON"),
        ({"json": "[]"}, "a schema, which is an object"),
        ({"json": True}, "a schema, which is an object"),
        ({"json": {"minimum": float("nan")}}, "not JSON"),
        ({"json": '{"minimum": NaN}'}, "NaN is not a JSON number"),
        ({"json": '{"a":' * 5000 + "1" + "}" * 5000}, "5000 levels deep: at most 100"),
        ({"json": nested(101)}, "101 levels deep"),
        ({"json": nested(5000)}, "levels deep"),
        ({"regex": "a" * 300000}, "300000 bytes long: at most 262144"),
        ({"grammar": 'start: "' + "a" * 70000}, "bytes long: at most 65536"),
        ({"choice": [f"item {i}" for i in range(100000)]}, "bytes long: at most 1048576"),
        ({"regex": "\ud800"}, "half of a surrogate pair"),
    ],
)
def test_what_asks_for_no_grammar_is_refused(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        StructuredOutputsParams(**fields)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("args", "fields", "kind", "message"),
    [
        (
            ({"type": "object"},),
            {},
            TypeError,
            "takes no positional arguments: name each, such as j",
        ),
        ((), {"schema": {}}, TypeError, "no option 'schema': did you mean 'json'"),
        ((), {"choices": ["a"]}, TypeError, "no option 'choices': did you mean 'choice'"),
        ((), {"regexp": "a"}, TypeError, "no option 'regexp': did you mean 'regex'"),
        ((), {"backend": "xgrammar"}, TypeError, "'backend': llguidance compiles every grammar"),
        ((), {"structural_tag": "{}"}, NotImplementedError, "is not built yet: give json, regex"),
        (
            (),
            {"json": {}, "whitespace_pattern": " "},
            NotImplementedError,
            "is not built yet: disable_any_whitespace=True allows none",
        ),
    ],
)
def test_16_a_name_that_no_grammar_has_gets_the_right_hint(args, fields, kind, message):
    with pytest.raises(kind, match=message):
        StructuredOutputsParams(*args, **fields)


def test_a_grammar_is_asked_for_in_one_of_five_ways():
    schema = {"type": "string", "enum": ["é"]}
    sources = [
        StructuredOutputsParams(json=schema, disable_any_whitespace=True).source,
        StructuredOutputsParams(json={}).source,
        StructuredOutputsParams(regex="").source,
        StructuredOutputsParams(choice=("a", "b")).source,
        StructuredOutputsParams(json_object=True).source,
    ]
    assert sources == [
        ("json", '{"type": "string", "enum": ["é"]}', True),
        ("json", "{}", False),
        ("regex", "", False),
        ("choice", '["a", "b"]', False),
        ("json_object", '{"type": "object"}', False),
    ]
    assert len(set(sources)) == 5  # they can be looked up
    assert pickle.loads(pickle.dumps(asked(1))) == asked(1)  # it is sent to other ranks
    with pytest.raises(ValueError, match="must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})
