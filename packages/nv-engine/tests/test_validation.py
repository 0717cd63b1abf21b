"""Parameters that are right by themselves, and whether a model can have them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nv_engine import Engine, EngineConfig, EngineRequest, StructuredOutputsParams
from nv_engine.facts import ModelFacts
from nv_engine.params import SamplingParams
from nv_engine.validation import check_params, plain_prompt

FACTS = ModelFacts(vocab_size=40, eos_token_ids=(1,), max_model_len=64, num_blocks=8, block_size=16)


@pytest.fixture(scope="module")
def checkpoint_engine(checkpoint: Path) -> Iterator[Engine]:
    engine = Engine(EngineConfig(model=str(checkpoint), dtype="float32"))
    yield engine
    engine.close()


def words(*ids: int) -> list[list[int]]:
    return [[token] for token in ids]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words_token_ids": words(*range(40))}, "bad_words.* forbid all 40 tokens"),
        ({"bad_words_token_ids": words(0, *range(2, 40)), "min_tokens": 1}, "forbid all 40"),
        ({"bad_words_token_ids": words(5, 6), "allowed_token_ids": {5, 6}}, "allow another"),
        (
            {"bad_words_token_ids": [[5, 5]], "allowed_token_ids": [5]},
            r"after \[5\] .*allow another",
        ),
        (
            {"bad_words_token_ids": [[6, 5], [5, 6, 6]], "allowed_token_ids": [5, 6]},
            r"after \[5, 6\] ",
        ),
    ],
)
def test_a_token_is_left_to_draw(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_params(SamplingParams(**fields), None, FACTS)


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words_token_ids": words(*range(39))},
        {"bad_words_token_ids": words(0, *range(2, 40))},
        {"bad_words_token_ids": [*words(5), [6, 5]], "allowed_token_ids": [5, 6]},
        {"bad_words_token_ids": [[5, 6], [6, 5]], "allowed_token_ids": [5, 6]},
        {"bad_words_token_ids": [[7, 5], [7, 6]], "allowed_token_ids": [5, 6]},
    ],
)
def test_one_token_is_enough(fields: dict[str, object]) -> None:
    check_params(SamplingParams(**fields), None, FACTS)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("token", [-1, 40, 2**32 + 5, -(2**70)])
def test_a_prompts_ids_are_of_the_vocabulary(token: int, plain: bool) -> None:
    for rest in ([], [41]):
        with pytest.raises(ValueError, match=rf"^the prompt has token id {token}: .*0 \.\. 39$"):
            plain_prompt([0, 39, token, *rest], FACTS, plain=plain)
    with pytest.raises(ValueError, match="has token id a int too large to show: the vocabulary is"):
        plain_prompt([10**5000], FACTS, plain=plain)
    assert plain_prompt([0, 39], FACTS, plain=plain) == [0, 39]


def test_a_prompt_becomes_plain_ints_unless_it_is_plain() -> None:
    given = [np.int64(3), True]
    assert repr(plain_prompt(given, FACTS)) == "[3, 1]"
    assert repr(plain_prompt(tuple(given), FACTS, plain=True)) == "[3, 1]"  # no list
    for wrong in ([2.5], b"ab", bytearray(b"ab"), "ab"):
        with pytest.raises(ValueError, match="must be a list of integer token ids"):
            plain_prompt(wrong, FACTS)  # type: ignore[arg-type]
    known = [3, 1]
    assert plain_prompt(known, FACTS) is not known
    assert plain_prompt(known, FACTS, plain=True) is known


def test_a_refused_list_leaves_no_trace(checkpoint: Path) -> None:
    """The error names the wrong one of several; the next ones draw as if it had not been."""
    engines = [Engine(EngineConfig(model=str(checkpoint), dtype="float32")) for _ in range(2)]
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    with pytest.raises(ValueError, match=r"prompt 1: the prompt is empty"):
        engines[0].add_list([EngineRequest([5, 6], params), EngineRequest([], params)])
    with pytest.raises(ValueError, match=r"^the prompt is empty"):
        engines[0].add_list([EngineRequest([], params)])
    with pytest.raises(TypeError, match=r"^the request is 'a': it must be an EngineRequest"):
        engines[0].add("a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^params is None: it must be a SamplingParams"):
        engines[0].add_list([EngineRequest([5], params), EngineRequest([5], None)])  # type: ignore[arg-type]
    for ids in ((9, 9), (None, 0)):  # None: the next free one, which is 0
        with pytest.raises(
            ValueError, match=r"prompt 1: request_id is .* an earlier request of this"
        ):
            engines[0].add_list([EngineRequest([5], params, request_id=each) for each in ids])
    assert not engines[0].has_unfinished
    found = []
    for engine in engines:
        assert engine.add_list([EngineRequest([5, 6, 7], params)]) == [0]
        tokens = []
        while engine.has_unfinished:
            tokens += [token for each in engine.step().updates for token in each.token_ids]
        found.append(tokens)
        engine.close()
    assert found[0] == found[1]
    assert len(found[0]) == 8


@pytest.mark.parametrize("wrong", [None, 5, EngineRequest([5], SamplingParams())])
def test_16_a_list_of_requests_is_a_list(checkpoint_engine: Engine, wrong: object) -> None:
    with pytest.raises(TypeError, match=r"^requests is .*: it must be a list of EngineRequests$"):
        checkpoint_engine.add_list(wrong)  # type: ignore[arg-type]


def test_16_an_abort_is_of_one_id(checkpoint_engine: Engine) -> None:
    for ids, named in ((([1, 2],), "request_id"), ((1, [0]), "index")):
        with pytest.raises(TypeError, match=rf"^{named} is .*: it must be one id, so call once"):
            checkpoint_engine.abort(*ids)  # type: ignore[arg-type]
    assert checkpoint_engine.abort(77) == []


@pytest.mark.parametrize("wrong", [None, {"model": "demo"}, "demo"])
def test_16_an_engine_is_made_of_a_config(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"^config is .*: it must be an EngineConfig$"):
        Engine(wrong)  # type: ignore[arg-type]


class AnyText:
    """Stands for a compiled grammar."""


@pytest.mark.parametrize(
    ("asked", "grammar", "ends", "message"),
    [
        ("a*", None, (1,), "structured_outputs is .*a.* needs the compiled grammar"),
        (None, AnyText(), (1,), "structured_outputs is None .* takes none without the other"),
        ("a*", AnyText(), (), "structured_outputs needs an EOS token, and .* add eos_token_id"),
    ],
)
def test_16_a_grammar_comes_with_its_parameters_and_can_end(asked, grammar, ends, message):
    wanted = None if asked is None else StructuredOutputsParams(regex=asked)
    params, facts = SamplingParams(structured_outputs=wanted), replace(FACTS, eos_token_ids=ends)
    with pytest.raises(ValueError, match=message):
        check_params(params, grammar, facts)
