"""Conformance cases of neighbours: what others do, and when, changes no request's tokens."""

import random

import pytest
import torch
from nv_api import LLM, SamplingParams
from tiny_checkpoint import make
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return make(tmp_path_factory.mktemp("scheduling"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def start(checkpoint):
    """Make an LLM of 16-token blocks; options as for LLM."""
    defaults = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 128}
    return lambda **options: LLM(str(checkpoint), **defaults | options)


@pytest.fixture(scope="module")
def truth(checkpoint):
    """transformers' greedy continuation, EOS ignored."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()

    def continue_(prompt, num_tokens):
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
        )
        return ids[0, len(prompt) :].tolist()

    return continue_


@pytest.fixture(params=[0, 1, 3])
def depth(request):
    return request.param


def greedy(num_tokens):
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def drawn(num_tokens, **more):
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, **more)


def prompt_of(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def complete(llm, prompts, params):
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def num_held(llm):
    """Blocks that some sequence holds."""
    metrics = llm.get_metrics()
    return metrics["num_blocks"] - metrics["num_free_blocks"]


def finish(llm):
    """Step to the end: token ids by request."""
    results = {}
    for _ in range(1000):
        results.update(llm.step()[0])
        if llm.is_finished():
            return results
    raise AssertionError("no end in 1,000 steps")


def test_temperature_0_is_transformers_alone_and_beside_others(start, truth, depth):
    """N01."""
    prompt = prompt_of(21)
    expected = truth(prompt, 16)
    with start(max_in_flight=depth) as llm:
        assert [complete(llm, [prompt], greedy(16)) for _ in range(2)] == [[expected]] * 2
        prompts = [prompt_of(9, 1), prompt, prompt_of(30, 2), prompt]
        hot = drawn(16, temperature=1.0, top_p=0.9)
        mixed = complete(llm, prompts, [hot, greedy(16), hot, greedy(16)])
    assert mixed[1] == mixed[3] == expected
    assert mixed[0] != truth(prompts[0], 16)


@pytest.mark.parametrize("num_tokens", [3, 30])
def test_a_request_added_before_a_generate_keeps_its_result(start, truth, num_tokens):
    """N11: whether it ends before the other or after."""
    early, prompt = prompt_of(12), prompt_of(14, 1)
    with start() as llm:
        request = llm.add_request(early, greedy(num_tokens))
        (output,) = llm.generate([prompt], greedy(10), use_tqdm=False)
        assert output["token_ids"] == truth(prompt, 10)
        assert not llm.is_finished()
        assert finish(llm) == {request: truth(early, num_tokens)}
        assert num_held(llm) == 0


def test_an_abort_gives_the_blocks_back_and_returns_nothing_more(start, truth, depth):
    """N29: one in the middle of its prompt, one that waits, one that is unknown."""
    prompts = [prompt_of(60, seed) for seed in range(4)]
    with start(max_in_flight=depth, max_num_batched_tokens=16, max_num_seqs=2) as llm:
        requests = [llm.add_request(prompt, greedy(6)) for prompt in prompts]
        for _ in range(2):
            llm.step()
        assert llm.get_metrics()["num_prefill_tokens"] < 60
        assert llm.get_metrics()["num_waiting"] >= 2
        for request in (requests[0], requests[3], 999):
            llm.abort_request(request)
        assert finish(llm) == {requests[i]: truth(prompts[i], 6) for i in (1, 2)}
        assert num_held(llm) == 0
        llm.abort_request(requests[1])
        assert llm.is_finished()


def test_a_running_request_gains_a_token_in_every_step(start, truth, depth):
    """N30, with k = 1: ten prompts that each fill the budget do not hold it up."""
    prompt = prompt_of(5)
    with start(max_in_flight=depth, max_num_batched_tokens=32) as llm:
        first = llm.add_request(prompt, greedy(40))
        llm.step()
        for seed in range(1, 11):
            llm.add_request(prompt_of(32, seed), greedy(2))
        results = {}
        for _ in range(39 + depth):
            results.update(llm.step()[0])
        assert results[first] == truth(prompt, 40)
        assert len(results | finish(llm)) == 11


def test_no_more_than_max_num_seqs_hold_kv(start, truth, depth):
    """N31."""
    prompts = [prompt_of(20, seed) for seed in range(8)]
    with start(max_in_flight=depth, max_num_seqs=2) as llm:
        requests = [llm.add_request(prompt, greedy(6)) for prompt in prompts]
        results, most = {}, 0
        while len(results) < 8:
            results.update(llm.step()[0])
            most = max(most, num_held(llm))
            assert llm.get_metrics()["num_running"] <= 2
            assert llm.get_metrics()["num_steps"] <= 100
    assert most == 2 * 2  # blocks: two sequences of at most 25 computed tokens
    assert [results[request] for request in requests] == [truth(p, 6) for p in prompts]


def test_a_seeded_draw_is_the_same_alone_in_company_reordered_and_preempted(start):
    """N33."""
    prompt, others = prompt_of(20), [prompt_of(20, seed) for seed in range(1, 4)]
    mine, theirs = drawn(30, seed=42), drawn(30)
    with start() as llm:
        (alone,) = complete(llm, [prompt], mine)
        assert complete(llm, [prompt, *others], [mine, *[theirs] * 3])[0] == alone
        assert complete(llm, [*others, prompt], [*[theirs] * 3, mine])[-1] == alone
        assert complete(llm, [prompt], drawn(30, seed=43)) != [alone]
    with start(num_kvcache_blocks=6) as llm:
        request = llm.add_request(others[0], theirs)
        assert complete(llm, [prompt, *others], [mine, *[theirs] * 3])[0] == alone
        assert len(finish(llm)[request]) == 30
        assert complete(llm, [*others, prompt], [*[theirs] * 3, mine])[-1] == alone
        assert llm.get_metrics()["num_preemptions"] > 0
