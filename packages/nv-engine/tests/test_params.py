import dataclasses
import inspect
import math
import pickle
from copy import copy, deepcopy
from dataclasses import FrozenInstanceError, replace
from decimal import Decimal

import numpy as np
import pytest
import torch
from nv_engine.params import SamplingParams
from nv_engine.sampling_names import SAMPLING_NAMES


def test_defaults_are_the_contract() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (
        1,
        1.0,
        1.0,
        -1,
        0.0,
    )
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert params.detokenize
    assert params.skip_special_tokens
    assert params.spaces_between_special_tokens


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("n", True),
        ("n", 16385),
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", np.float32),
        ("temperature", torch.tensor(0.5, device="meta")),
        ("top_p", 0),
        ("top_p", 7),
        ("top_p", math.nan),
        ("top_k", 0.5),
        ("top_k", -2),
        ("min_p", math.nan),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("seed", 1.0),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("min_tokens", -1),
        ("logprobs", -2),
        ("prompt_logprobs", 0.5),
        ("stop", [""]),
        ("stop", 3),
        ("stop_token_ids", bytearray(b"ab")),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("allowed_token_ids", []),
        ("logit_bias", {-1: 1.0}),
        ("bad_words", [""]),
        ("top_k", 2**31),
        ("min_tokens", 2**70),
        ("temperature", 10**400),
        ("seed", np.True_),
        ("seed", torch.tensor(True)),
        ("stop_token_ids", 5),
        ("stop_token_ids", "ab"),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", np.array([0.5])),
        ("allowed_token_ids", np.array([True])),
        ("logit_bias", [1]),
        ("bad_words", 5),
        ("ignore_eos", "yes"),
        ("skip_special_tokens", "no"),
        ("detokenize", None),
        ("include_stop_str_in_output", 1),
        ("bad_words_token_ids", torch.empty((), device="meta")),
    ],
)
def test_out_of_range_names_field_and_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field) as error:
        SamplingParams(**{field: value})
    shown = value[0] if isinstance(value, list | np.ndarray) and len(value) else value
    assert field == "logit_bias" or (str(shown) or "''")[:200] in str(error.value)


class Unruly:
    """A value that can be neither shown nor compared."""

    def __repr__(self) -> str:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("value", [Unruly(), [Unruly()], {1: Unruly()}])
def test_16_a_value_that_cannot_be_shown_is_named_by_its_type(value: object) -> None:
    reason = f"a {type(value).__name__} that cannot be shown"
    for field in ("temperature", "n", "stop", "ignore_eos", "structured_outputs"):
        with pytest.raises(ValueError, match=f"{field} is {reason}"):
            SamplingParams(**{field: value})
    with pytest.raises(NotImplementedError, match=f"best_of={reason} is not built yet"):
        SamplingParams(best_of=value)


@pytest.mark.parametrize("value", [torch.ones(2, device="meta"), [np.ones(2)], Decimal("sNaN")])
def test_16_a_value_that_cannot_be_compared_asks_for_something(value: object) -> None:
    with pytest.raises(NotImplementedError, match=r"best_of=.* is not built yet"):
        SamplingParams(best_of=value)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"top_k": 0},
        {"top_k": -1},
        {"min_p": 1.0},
        {"max_tokens": None},
        {"seed": -5},
        {"seed": 2**64 - 1},
        {"stop": "end"},
        {"stop": ["a", "b"]},
        {"logprobs": -1},
        {"logit_bias": {3: -100.0}},
    ],
)
def test_edges_are_accepted(fields: dict[str, object]) -> None:
    assert SamplingParams(**fields).changed(fields) or fields == {"top_k": -1}


@pytest.mark.parametrize("is_set_later", [False, True])
@pytest.mark.parametrize(
    ("field", "value", "plain"),
    [
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", 1, 1.0),
        ("max_tokens", np.int64(3), 3),
        ("logprobs", np.int64(2), 2),
        ("seed", np.int64(3), 3),
        ("seed", torch.tensor(3), 3),
        ("ignore_eos", np.True_, True),
        ("stop_token_ids", np.array([3, 4]), [3, 4]),
        ("stop_token_ids", range(4, 2, -1), [4, 3]),
        ("allowed_token_ids", {50, 7, 300}, [7, 50, 300]),
        ("allowed_token_ids", torch.tensor([9, 5]), [9, 5]),
        ("logit_bias", {np.int64(5): np.float64(1)}, {5: 1.0}),
        ("bad_words", {"b", "a"}, ["a", "b"]),
        ("bad_words_token_ids", np.array([[3, 4]]), [[3, 4]]),
    ],
)
def test_values_become_plain(field: str, value: object, plain: object, is_set_later: bool) -> None:
    if is_set_later:
        params = SamplingParams()
        setattr(params, field, value)
        params = params.frozen()
    else:
        params = SamplingParams(**{field: value})
    assert repr(getattr(params, field)) == repr(plain)


def test_one_text_or_one_list_is_not_taken_for_many() -> None:
    with pytest.raises(ValueError, match=r"bad_words is 'Paris'.*\['Paris'\]"):
        SamplingParams(bad_words="Paris")
    with pytest.raises(ValueError, match=r"bad_words_token_ids has 3.*\[3\]"):
        SamplingParams(bad_words_token_ids=[3, 4])


def test_min_tokens_within_max_tokens() -> None:
    with pytest.raises(ValueError, match="min_tokens is 9"):
        SamplingParams(min_tokens=9, max_tokens=8)
    assert SamplingParams(min_tokens=9, max_tokens=None).min_tokens == 9


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match="detokenize=True"):
        SamplingParams(stop="x", detokenize=False)
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams().stop_strings == ()


def test_unknown_field_and_positional_are_type_errors() -> None:
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)
    with pytest.raises(TypeError):
        SamplingParams(2)


@pytest.mark.parametrize("words", [[[3], []], [[4, -1]], [["a"]]])
def test_bad_words_as_ids_are_token_ids(words: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="bad_words_token_ids"):
        SamplingParams(bad_words_token_ids=words)
    assert SamplingParams(bad_words_token_ids=[[3], (4, 5)]).bad_words is None


def test_fields_may_be_set_and_are_checked_when_a_request_is_made() -> None:
    params = SamplingParams()
    params.temperature, params.max_tokens = 0.2, 5
    assert params == SamplingParams(temperature=0.2, max_tokens=5)
    params.top_p = 7
    with pytest.raises(ValueError, match="top_p is 7"):
        params.check()
    with pytest.raises(ValueError, match="top_p is 7"):
        params.frozen()


def test_a_list_that_grew_is_checked_when_a_request_is_made() -> None:
    params = SamplingParams(stop_token_ids=[3])
    params.stop_token_ids.append(-1)
    with pytest.raises(ValueError, match="stop_token_ids entry is -1"):
        params.frozen()
    params.stop_token_ids[1] = np.int64(4)
    assert repr(params.frozen().stop_token_ids) == "[3, 4]"


def test_a_value_of_a_copy_is_checked_too() -> None:
    params = SamplingParams(top_p=0.5).frozen().clone()
    params.top_p = 7
    with pytest.raises(ValueError, match="top_p is 7"):
        params.frozen()


def test_a_clone_shares_nothing() -> None:
    params = SamplingParams(stop_token_ids=[3], logit_bias={4: 1.0})
    twin = params.clone()
    assert twin == params
    twin.stop_token_ids.append(5)
    twin.logit_bias[6] = 2.0
    twin.seed = 1
    assert params == SamplingParams(stop_token_ids=[3], logit_bias={4: 1.0})


def test_a_requests_own_copy_stays_as_it_is() -> None:
    params = SamplingParams(stop_token_ids=[3])
    frozen = params.frozen()
    assert frozen == params
    assert frozen.frozen() is frozen
    params.stop_token_ids.append(4)
    params.seed = 9
    assert (frozen.stop_token_ids, frozen.seed) == ([3], None)
    with pytest.raises(FrozenInstanceError, match="seed cannot be set"):
        frozen.seed = 1
    sent = pickle.loads(pickle.dumps(frozen))  # to another rank
    assert sent == frozen
    with pytest.raises(FrozenInstanceError):
        sent.seed = 1
    thawed = frozen.clone()
    thawed.seed = 1
    assert (thawed.seed, frozen.seed) == (1, None)
    assert replace(frozen, seed=2).seed == 2


def test_values_set_past_the_fields_are_checked():
    params = SamplingParams(top_p=0.5)
    assert SamplingParams(**vars(params)) == params
    vars(params)["top_p"] = 7
    with pytest.raises(ValueError, match="top_p is 7"):
        params.frozen()


def test_a_check_of_its_own_is_run_each_time():
    class Cool(SamplingParams):
        def check(self):
            super().check()
            if self.temperature > 1:
                raise ValueError("too hot")

    params = Cool()
    params.temperature = 1.5
    for _ in range(3):
        with pytest.raises(ValueError, match="too hot"):
            params.frozen()


def test_copies_of_frozen_parameters():
    params = SamplingParams(top_p=0.5, stop=["a"]).frozen()
    assert pickle.loads(pickle.dumps(params)) == copy(params) == deepcopy(params) == params


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("best_of", 4, "set n and logprobs"),
        ("logits_processors", [len], "use logit_bias, allowed_token_ids, bad_words or structured"),
        ("guided_decoding", {"json": {}}, "pass structured_outputs=StructuredOutputsParams"),
        ("truncate_prompt_tokens", 8, "cut the prompt's token ids"),
        ("length_penalty", 0.8, "beam search is not there; draw n completions"),
        ("early_stopping", True, "beam search"),
        ("use_beam_search", True, "beam search"),
        ("extra_args", {"a": 1}, "no plugin reads them"),
        ("flat_logprobs", True, "logprobs are a list of dicts"),
        ("thinking_token_budget", 64, "max_tokens bounds"),
        ("repetition_detection", object(), "use repetition_penalty"),
        ("logprob_token_ids", [1, 2], "logprobs=-1 gives"),
    ],
)
def test_what_is_not_built_names_what_there_is_instead(field, value, instead) -> None:
    with pytest.raises(NotImplementedError, match=f"{field}=.* is not built yet: {instead}"):
        SamplingParams(**{field: value})


def test_every_name_of_vllm_that_is_not_built_has_its_advice() -> None:
    assert SAMPLING_NAMES.unbuilt.keys() == SAMPLING_NAMES.instead.keys()
    ours = {field.name for field in dataclasses.fields(SamplingParams)}
    assert not ours & (SAMPLING_NAMES.unbuilt.keys() | SAMPLING_NAMES.no_difference)


@pytest.mark.parametrize(
    "given",
    [
        {"best_of": 1, "temperature": 0.5},
        {"best_of": np.int64(1), "logits_processors": [], "extra_args": {}, "length_penalty": 1.0},
        {"guided_decoding": None, "use_beam_search": False, "thinking_token_budget": -1},
        {"output_kind": "any", "skip_clone": True, "stream_interval": 5},
    ],
)
def test_what_asks_for_nothing_is_accepted_with_one_warning(given) -> None:
    foreign = sorted(given.keys() - {"temperature"})
    with pytest.warns(UserWarning, match="without effect") as seen:
        params = SamplingParams(**given)
    (warning,) = seen
    assert str(warning.message) == f"accepted without effect: {', '.join(foreign)}"
    assert warning.filename == __file__
    assert params == SamplingParams(temperature=given.get("temperature", 1.0))


@pytest.mark.parametrize(
    ("args", "given", "match"),
    [
        ((), {"tempurature": 1}, "SamplingParams has no option 'tempurature': .*'temperature'"),
        ((), {"max_new_tokens": 1}, "no option 'max_new_tokens': did you mean 'max_tokens'"),
        ((), {"zzzz": 1}, "no option 'zzzz': there are allowed_token_ids, bad_words"),
        ((), {"max_tries": 1}, "no option 'max_tries': there are"),  # not max_tokens
        ((0.5,), {}, "takes no positional arguments: name each, such as n=0.5"),
    ],
)
def test_unknown_and_unnamed_values_are_type_errors(args, given, match) -> None:
    with pytest.raises(TypeError, match=match):
        SamplingParams(*args, **given)


JSON = "pass structured_outputs=StructuredOutputsParams(json=…)"
BEAMS = "beam search is not there; draw n completions and keep the likeliest"
STEPS = "nv does not have this step: use temperature, top_p, top_k, min_p or the penalties"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_completion_tokens", "did you mean 'max_tokens'?"),
        ("max_output_tokens", "did you mean 'max_tokens'?"),
        ("stop_sequences", "did you mean 'stop'?"),
        ("stop_words", "did you mean 'stop'?"),
        ("stop_token", "pass stop for a text, or stop_token_ids for ids"),
        ("num_return_sequences", "did you mean 'n'?"),
        ("top_logprobs", "did you mean 'logprobs'?"),
        ("temp", "did you mean 'temperature'?"),
        ("topk", "did you mean 'top_k'?"),
        ("guided_json", JSON),
        ("json_schema", JSON),
        ("guided_regex", "pass structured_outputs=StructuredOutputsParams(regex=…)"),
        ("guided_choice", "pass structured_outputs=StructuredOutputsParams(choice=…)"),
        ("response_format", f"{JSON}, or its json_object=True for any object"),
        ("do_sample", "temperature=0 is greedy, and any other temperature draws"),
        ("num_beams", BEAMS),
        ("logit_processors", "use logit_bias, allowed_token_ids, bad_words or structured_outputs"),
        ("max_length", "pass max_tokens, which counts the completion alone"),
        ("typical_p", STEPS),
        ("mirostat", STEPS),
        ("user", "it would change nothing here: leave it out"),
        ("stream", "call stream of LLM, or generate of AsyncLLM"),
        ("tools", "pass it to chat"),
        ("enable_thinking", "pass chat_template_kwargs={'enable_thinking': …} to chat"),
        ("messages", "pass it to generate or chat"),
        (
            "logits_processorz",
            "did you mean 'logits_processors'? It is not built yet: use logit_bias, "
            "allowed_token_ids, bad_words or structured_outputs",
        ),
    ],
)
def test_16_a_name_of_another_library_gets_the_right_hint(name, hint) -> None:
    with pytest.raises(TypeError) as error:
        SamplingParams(**{name: 3})
    assert str(error.value) == f"SamplingParams has no option {name!r}: {hint}"


def test_16_a_hint_is_a_field_and_no_field_has_another_hint() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(SAMPLING_NAMES.renamed.values()) <= fields
    assert not fields & (SAMPLING_NAMES.renamed.keys() | SAMPLING_NAMES.advice.keys())
    assert not SAMPLING_NAMES.renamed.keys() & SAMPLING_NAMES.advice.keys()


def test_none_may_stand_for_the_default() -> None:
    given = {"n": None, "top_p": None, "temperature": 0.5, "stop": None}
    assert SamplingParams.from_optional(**given) == SamplingParams(temperature=0.5)
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None


def test_the_signature_is_that_of_the_fields() -> None:
    parameters = inspect.signature(SamplingParams).parameters.values()
    fields = dataclasses.fields(SamplingParams)
    assert [(p.name, p.default) for p in parameters] == [(f.name, f.default) for f in fields]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"stop_strings": ["a"]}, "no option 'stop_strings': did you mean 'stop'"),
        ({"max_new_tokens": 3}, "no option 'max_new_tokens': did you mean 'max_tokens'"),
    ],
)
def test_hints_know_the_names_of_other_libraries(given, match) -> None:
    with pytest.raises(TypeError, match=match):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("field", "bounds"),
    [
        ("temperature", r"\[0, 3.4e\+38\]"),
        ("repetition_penalty", r"\(0, 3.4e\+38\]"),
        ("top_p", r"\(0, 1\]"),
    ],
)
@pytest.mark.parametrize("value", [1e300, math.nan, 10**400])
def test_a_bound_of_an_error_excludes_the_value(field, bounds, value) -> None:
    with pytest.raises(ValueError, match=f"{field} is .*: it must be a number in {bounds}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "given",
    [
        {"stop": {"x" * 20000: 1}},
        {"stop_token_ids": "x" * 20000},
        {"n": 10**5000},
        {"logit_bias": ["x" * 20000]},
        {"best_of": "x" * 20000},
    ],
)
def test_a_value_that_is_too_long_to_show_is_shortened(given) -> None:
    (name,) = given
    with pytest.raises((ValueError, NotImplementedError), match=name) as error:
        SamplingParams(**given)
    assert len(str(error.value)) < 500
