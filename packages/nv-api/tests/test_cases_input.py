"""Conformance cases of bad input and limits: an error before any work, or a clean end."""

import math
import subprocess
import sys

import pytest
import torch
from nv_api import LLM, SamplingParams
from tiny_checkpoint import make

VOCAB = 258
BAD_PARAMS = [
    ("top_k", 0.5),
    ("top_p", 0),
    ("top_p", 7),
    ("temperature", math.nan),
    ("min_p", math.nan),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    torch.set_num_threads(1)
    folder = make(tmp_path_factory.mktemp("input"), tie_word_embeddings=False)
    options = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 32}
    with LLM(str(folder), max_model_len=64, **options) as llm:
        yield llm


def greedy(num_tokens, **more):
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **more)


def assert_idle(llm):
    """Nothing is queued, runs, or holds a block."""
    metrics = llm.get_metrics()
    assert llm.is_finished()
    assert metrics["num_running"] == metrics["num_waiting"] == 0
    assert metrics["num_free_blocks"] == metrics["num_blocks"]


@pytest.mark.parametrize(("name", "value"), BAD_PARAMS)
def test_bad_parameters_are_refused_where_they_are_made(name, value):
    """N04."""
    with pytest.raises(ValueError, match=f"^{name} is {value}: it must be"):
        SamplingParams(**{name: value})


def test_bad_parameters_are_refused_without_assertions_too():
    """N04, under `python -O`: a check that were an assert would be gone."""
    script = f"""
assert False
from math import nan
from nv_engine import SamplingParams
for name, value in {BAD_PARAMS!r}:
    try:
        SamplingParams(**{{name: value}})
    except ValueError as error:
        print(str(error).startswith(f"{{name}} is {{value}}: it must be"))
"""
    done = subprocess.run(
        [sys.executable, "-O", "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True"] * len(BAD_PARAMS)


def test_no_max_tokens_means_up_to_max_model_len(llm):
    """N05."""
    (output,) = llm.generate([[7] * 10], greedy(None), use_tqdm=False)
    assert len(output["token_ids"]) == 54
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("empty", ["", [], {"prompt": ""}, {"prompt_token_ids": []}], ids=repr)
def test_an_empty_prompt_is_refused_and_the_next_call_works(llm, empty):
    """N06, N07."""
    for prompts in ([empty], ["ok", empty]):
        with pytest.raises(ValueError, match="is empty"):
            llm.generate(prompts, greedy(3), use_tqdm=False)
        assert_idle(llm)
        (output,) = llm.generate(["x"], greedy(3), use_tqdm=False)
        assert output.prompt == "x"
        assert len(output["token_ids"]) == 3
    with pytest.raises(ValueError, match="is empty"):
        llm.add_request(empty, greedy(3))
    assert_idle(llm)


@pytest.mark.parametrize("num_params", [1, 2, 4])
def test_as_many_parameters_as_prompts_or_nothing_is_queued(llm, num_params):
    """N09."""
    before = llm.get_metrics()["num_requests"]
    with pytest.raises(ValueError, match=f"3 prompts and {num_params} sampling_params"):
        llm.generate(["a", "b", "c"], [greedy(2)] * num_params, use_tqdm=False)
    assert llm.get_metrics()["num_requests"] == before
    assert_idle(llm)


@pytest.mark.parametrize(
    ("prompt", "more", "named"),
    [
        ([5, VOCAB], {}, VOCAB),
        ([5, -1], {}, -1),
        ([5], {"logit_bias": {VOCAB: 1}}, VOCAB),
        ([5], {"stop_token_ids": [VOCAB]}, VOCAB),
    ],
    ids=repr,
)
def test_ids_outside_the_vocabulary_are_refused_at_admission(llm, prompt, more, named):
    """N13, on one rank."""
    before = llm.get_metrics()["num_requests"]
    message = rf"token id {named}: the vocabulary is 0 \.\. {VOCAB - 1}"
    with pytest.raises(ValueError, match=message):
        llm.generate([prompt], greedy(2, **more), use_tqdm=False)
    with pytest.raises(ValueError, match=message):
        llm.add_request(prompt, greedy(2, **more))
    assert llm.get_metrics()["num_requests"] == before
    assert_idle(llm)


@pytest.mark.parametrize("max_tokens", [1, 10, None])
def test_a_prompt_one_short_of_max_model_len_gives_one_token(llm, max_tokens):
    """N15."""
    (output,) = llm.generate([[9] * 63], greedy(max_tokens), use_tqdm=False)
    assert len(output["token_ids"]) == 1
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("length", [64, 65])
def test_a_prompt_that_leaves_no_room_is_refused(llm, length):
    """N15."""
    message = f"{length} tokens and max_model_len is 64"
    with pytest.raises(ValueError, match=message):
        llm.generate([[9] * length], greedy(1), use_tqdm=False)
    with pytest.raises(ValueError, match=message):
        llm.add_request([9] * length, greedy(1))
    assert_idle(llm)
