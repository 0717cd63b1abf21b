"""Deterministic mode: a request's tokens and log-probabilities, bit for bit, in any company."""

import random

import pytest
import torch
from nv_api import LLM, SamplingParams

NUM_TOKENS = 24
DEFAULTS = {"max_model_len": 320, "kvcache_block_size": 16, "num_kvcache_blocks": 400}
ROADS = {
    "synchronous": {"max_in_flight": 0},
    "ahead": {"max_in_flight": 2},
    "chunked": {"max_num_batched_tokens": 13, "max_in_flight": 1},
    "few at once": {"max_num_seqs": 3},
    "squeezed": {"num_kvcache_blocks": 26, "max_in_flight": 2},
    "squeezed and chunked": {"num_kvcache_blocks": 26, "max_num_batched_tokens": 40},
    "large blocks": {"kvcache_block_size": 256, "num_kvcache_blocks": 20},
    "no prefix cache": {"enable_prefix_caching": False},
}
KINDS = [  # neighbours of every kind; only the first is compared on every road
    {"logprobs": 3, "prompt_logprobs": 2},
    {"logprobs": 3},
    {"logprobs": 20, "temperature": 0.9, "top_p": 0.8, "seed": 5},
    {"temperature": 1.0, "seed": 7},
    {"repetition_penalty": 1.3, "logprobs": 1},
]


@pytest.fixture(scope="module")
def requests():
    rng = random.Random(3)
    shared = [rng.randrange(3, 250) for _ in range(150)]
    sizes = [1, 2, 15, 16, 17, 33, 64, 90, 129, 200]
    own = [[rng.randrange(3, 250) for _ in range(size)] for size in sizes]
    prompts = [*own, shared + own[3], shared + own[5], shared[:140] + own[2], shared]
    kinds = [
        {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0}
        | KINDS[index % len(KINDS)]
        for index in range(len(prompts))
    ]
    return list(zip(prompts, (SamplingParams(**kind) for kind in kinds), strict=True))


def said(output):
    """All that a request answers with, exactly."""
    completion = output.outputs[0]
    return completion.token_ids, completion.logprobs, output.prompt_logprobs


def run(llm, requests):
    prompts, params = zip(*requests, strict=True)
    return [said(output) for output in llm.generate(list(prompts), list(params), use_tqdm=False)]


def alone(checkpoint, requests, **options):
    """Each request in an engine that runs nothing else, without a cached prefix."""
    with LLM(checkpoint, device="cpu", **DEFAULTS, **options) as llm:
        found = []
        for request in requests:
            llm.reset_prefix_cache()
            found += run(llm, [request])
        return found


@pytest.fixture(scope="module", params=["float32", "bfloat16", "fp8 cache", "fp8 weights"])
def mode(request):
    if request.param == "fp8 weights":
        return {"dtype": "bfloat16", "quantization": "fp8", "deterministic": True}
    if request.param == "fp8 cache":
        return {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "deterministic": True}
    return {"dtype": request.param, "deterministic": True}


@pytest.fixture(scope="module")
def expected(checkpoint, requests, mode):
    return alone(checkpoint, requests, **mode)


@pytest.mark.parametrize("road", ROADS)
def test_company_does_not_matter(checkpoint, requests, mode, expected, road):
    options = DEFAULTS | mode | ROADS[road]
    with LLM(checkpoint, device="cpu", **options) as llm:
        assert run(llm, requests) == expected
        order = list(range(len(requests)))
        random.Random(9).shuffle(order)
        again = run(llm, [requests[index] for index in order])  # mostly from the prefix cache
        assert again == [expected[index] for index in order]
        metrics = llm.get_metrics()
        assert ("squeezed" in road) == (metrics["num_preemptions"] > 0)
        if road == "ahead":
            assert metrics["cache_hit_tokens"] > 0


def test_fp32_on_a_cpu_needs_no_mode(checkpoint, requests):
    """The contract's promise for seeded draws: without log-probabilities of ties, all the same."""
    expected = alone(checkpoint, requests, dtype="float32")
    options = DEFAULTS | ROADS["squeezed and chunked"]
    with LLM(checkpoint, device="cpu", dtype="float32", **options) as llm:
        assert run(llm, requests) == expected


def test_two_threads(checkpoint, requests):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        options = {"dtype": "bfloat16", "deterministic": True}
        some = requests[4:]
        expected = alone(checkpoint, some, **options)
        with LLM(checkpoint, device="cpu", **DEFAULTS, **options) as llm:
            assert run(llm, some) == expected
    finally:
        torch.set_num_threads(before)
