"""What a model makes of parameters that are right by themselves."""

import pytest
from nv_engine.executor.base import ModelFacts
from nv_engine.params import SamplingParams
from nv_engine.validation import check_params

FACTS = ModelFacts(vocab_size=40, eos_token_ids=(1,), max_model_len=64, num_blocks=8, block_size=16)


def words(*ids: int) -> list[list[int]]:
    return [[token] for token in ids]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words_token_ids": words(*range(40))}, "bad_words.* forbid all 40 tokens"),
        ({"bad_words_token_ids": words(0, *range(2, 40)), "min_tokens": 1}, "forbid all 40"),
        ({"bad_words_token_ids": words(5, 6), "allowed_token_ids": {5, 6}}, "allow another"),
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
    ],
)
def test_one_token_is_enough(fields: dict[str, object]) -> None:
    check_params(SamplingParams(**fields), None, FACTS)
