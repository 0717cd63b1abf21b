"""A seeded request gives the same tokens whatever runs beside it, however it is run (fp32, CPU).

Twelve requests that mix every control are completed one by one, then together: shuffled, in a pool
too small for them, at other depths, bursts and budgets, with strangers between them.
"""

import random

import pytest
import torch
from nv_api import LLM, SamplingParams, StructuredOutputsParams
from tiny_checkpoint import make

TEXTS = ["", "a common beginning of some length, ", "a common beginning, and another end: "]
CONTROLS = [
    {},
    {"temperature": 0},
    {"temperature": 1.6, "top_p": 0.9, "n": 3},
    {"top_k": 20, "repetition_penalty": 1.3},
    {"min_p": 0.02, "frequency_penalty": 0.7, "presence_penalty": 0.2, "logprobs": 2},
    {"min_tokens": 9, "logit_bias": {256: 50.0}},
    {"allowed_token_ids": [*range(65, 91)], "ignore_eos": False, "prompt_logprobs": 1},
    {"stop": ["a", "e"], "n": 2},
    {"bad_words": ["a", "b c"]},
    {"structured_outputs": StructuredOutputsParams(regex="([a-f]{2}[0-9]){3,9}")},
    {"top_p": 0.5, "top_k": 40, "min_p": 0.01, "temperature": 0.8, "n": 2},
    {"stop_token_ids": [*range(40)]},
]
REQUESTS = [
    (f"{TEXTS[i % 3]}prompt {i}", SamplingParams(**{"max_tokens": 25, "seed": 100 + i} | more))
    for i, more in enumerate(CONTROLS)
]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    torch.set_num_threads(1)
    folder = make(tmp_path_factory.mktemp("invariance"), tie_word_embeddings=False)
    defaults = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 256}
    return lambda **options: LLM(str(folder), **defaults | options)


def run(llm, requests):
    prompts, params = zip(*requests, strict=True)
    return [
        [
            (each.token_ids, each.text, each.finish_reason, each.stop_reason)
            for each in output.outputs
        ]
        for output in llm.generate(prompts, params, use_tqdm=False)
    ]


@pytest.fixture(scope="module")
def alone(start):
    """The output of each alone, in an engine without any shortcut."""
    with start(max_in_flight=0, enable_prefix_caching=False) as llm:
        return [run(llm, [request])[0] for request in REQUESTS]


SQUEEZES = {
    "together": {},
    "a pool for two": {"num_kvcache_blocks": 12},
    "a pool for one": {"num_kvcache_blocks": 6, "enable_prefix_caching": False},
    "chunks": {"max_num_batched_tokens": 7},
    "few at once": {"max_num_seqs": 3},
    "bursts": {"max_burst": 5},
    "all of it": {"num_kvcache_blocks": 10, "max_num_batched_tokens": 33, "max_burst": 3},
}


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("squeeze", SQUEEZES)
def test_order_neighbours_memory_and_overlap_change_nothing(start, alone, squeeze, depth):
    rng = random.Random(f"{squeeze} {depth}")
    with start(max_in_flight=depth, **SQUEEZES[squeeze]) as llm:
        for _ in range(2):  # the second time much of it is cached
            order = rng.sample(range(len(REQUESTS)), len(REQUESTS))
            found = run(llm, [REQUESTS[i] for i in order])
            assert found == [alone[i] for i in order]
        strangers = [llm.add_request("a common beginning", SamplingParams(n=2)) for _ in range(3)]
        assert run(llm, REQUESTS) == alone
        metrics, ended = llm.get_metrics(), []
        while not llm.is_finished():
            ended += [request_id for request_id, _ in llm.step()[0]]
    assert sorted(ended) == sorted(strangers * 2)
    assert (metrics["num_preemptions"] > 0) == ("num_kvcache_blocks" in SQUEEZES[squeeze])
