"""Parameters as scripts write them: fields set one by one, used again, changed in between."""

import pytest
import torch
from nv_api import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(checkpoint):
    torch.set_num_threads(1)
    options = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 64}
    with LLM(checkpoint, **options) as llm:
        yield llm


def run(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output["token_ids"] for output in outputs]


def test_the_recommended_parameters_can_be_changed(llm):
    params = llm.get_default_sampling_params().clone()
    assert (params.temperature, params.top_k) == (0.6, 20)
    params.temperature, params.max_tokens, params.ignore_eos = 0.0, 5, True
    expected = SamplingParams(temperature=0, top_k=20, max_tokens=5, ignore_eos=True)
    assert run(llm, "x", params) == run(llm, "x", expected)
    assert len(run(llm, "x", params)[0]) == 5


def test_what_was_set_is_checked_before_any_work(llm):
    good, bad = SamplingParams(max_tokens=3), SamplingParams()
    bad.min_p = 3
    num_steps = llm.get_metrics()["num_steps"]
    with pytest.raises(ValueError, match="min_p is 3"):
        run(llm, ["x", "y"], [good, bad])
    with pytest.raises(ValueError, match="min_p is 3"):
        llm.add_request("x", bad)
    assert llm.is_finished()
    assert llm.get_metrics()["num_steps"] == num_steps


def test_a_request_does_not_see_what_is_set_after_it(llm):
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logit_bias={7: -5.0})
    (expected,) = run(llm, "x", params)
    request_id = llm.add_request("x", params)
    params.max_tokens, params.temperature, params.seed = 2, 5.0, 3
    params.logit_bias[7] = 100.0
    finished = []
    while not llm.is_finished():
        finished += llm.step()[0]
    assert finished == [(request_id, expected)]
    assert run(llm, "x", params) != [expected]
