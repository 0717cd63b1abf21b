"""The trained checkpoint on a card: the CPU's tokens in fp32, transformers' in bf16, and fp8.

Marked gpu. In bf16 tokens may differ where the best logits are a few bf16 steps apart; the tests
have the number.
"""

from collections import Counter
from functools import cache

import measures
import pytest
import test_device_gpu as roads
import torch
from nv_engine import SamplingParams
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.gpu
MOST_STEPS = 2
"""Of bf16, that a token may be below the likeliest: one for our rounding, one for theirs."""
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=40, ignore_eos=True)
FP8 = {"device": "cuda", "dtype": "bfloat16", "kv_cache_dtype": "fp8"}
CHUNKED = {"max_num_batched_tokens": 64}  # most keys are read back from the cache


@pytest.fixture(scope="module")
def expected(trained, prompts):
    """The CPU's fp32 tokens."""
    return roads.run(trained, prompts, roads.GREEDY, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def drawn(trained, prompts):
    """The CPU's fp32 draws: unlike greedy ones, they do not fall into a loop."""
    return roads.run(trained, prompts, SEEDED, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def reference(trained):
    """transformers in fp32 on the CPU."""
    return AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def rounded(trained):
    """transformers in bf16 on the card."""
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.bfloat16)
    return model.to("cuda").eval()


@pytest.fixture(scope="module")
def steps_behind(rounded):
    """`measures.steps_behind` of that model, computed once where roads give the same tokens."""

    @cache
    def steps(prompt, tokens):
        return measures.steps_behind(rounded, list(prompt), list(tokens))

    return steps


@pytest.mark.parametrize("road", roads.ROADS)
def test_fp32_greedy_equals_the_cpu(trained, prompts, expected, road):
    options = {"device": "cuda", "dtype": "float32"} | roads.ROADS[road]
    assert roads.run(trained, prompts, roads.GREEDY, **options) == expected


@pytest.mark.parametrize("road", roads.ROADS)
def test_fp32_seeded_draws_equal_the_cpu(trained, prompts, drawn, road):
    options = {"device": "cuda", "dtype": "float32"} | roads.ROADS[road]
    assert roads.run(trained, prompts, SEEDED, **options) == drawn


@pytest.mark.parametrize("road", roads.ROADS)
def test_bf16_greedy_is_transformers_up_to_ties(trained, prompts, steps_behind, road):
    options = {"device": "cuda", "dtype": "bfloat16"} | roads.ROADS[road]
    got = roads.run(trained, prompts, roads.GREEDY, **options)
    below = [
        steps
        for prompt, tokens in zip(prompts, got, strict=True)
        for steps in steps_behind(tuple(prompt), tuple(tokens))
    ]
    counts = Counter(below)
    print("tokens by bf16 steps below the likeliest:", sorted(counts.items()))
    assert max(below) <= MOST_STEPS
    assert counts[0] > 0.97 * len(below)


def test_fp32_logprobs_are_transformers(trained, passages, reference):
    truth = measures.reference_logprobs(reference, passages)
    for options in ({}, CHUNKED, {"enforce_eager": True}):
        said = measures.text_logprobs(trained, passages, device="cuda", dtype="float32", **options)
        assert said == pytest.approx(truth, abs=1e-3)


def test_bf16_is_as_near_to_fp32_as_transformers_is(trained, passages, reference, rounded):
    truth = measures.reference_logprobs(reference, passages)
    theirs = measures.distance(measures.reference_logprobs(rounded, passages), truth)
    for options in ({}, CHUNKED):
        said = measures.text_logprobs(trained, passages, device="cuda", dtype="bfloat16", **options)
        ours = measures.distance(said, truth)
        print(f"mean distance from fp32, nats: nv {ours:.5f}, transformers {theirs:.5f}")
        assert ours < 1.5 * theirs


@pytest.mark.parametrize("options", [{}, CHUNKED], ids=["whole", "chunked"])
def test_an_fp8_cache_costs_little(trained, passages, options):
    plain = measures.text_logprobs(trained, passages, **FP8 | {"kv_cache_dtype": "auto"} | options)
    fp8 = measures.text_logprobs(trained, passages, **FP8 | options)
    ratio = measures.perplexity(fp8) / measures.perplexity(plain)
    print(f"fp8 / bf16 perplexity {ratio:.5f}, distance {measures.distance(fp8, plain):.5f} nats")
    assert measures.distance(fp8, plain) > 0
    assert 0.98 < ratio < 1.02


def test_fp8_greedy_tokens_are_likely_ones(trained, prompts, reference):
    """Each is nearly the likeliest by fp32: fp8 moves a choice only where it is a close one."""
    got = roads.run(trained, prompts, roads.GREEDY, **FP8)
    below = [
        steps
        for prompt, tokens in zip(prompts, got, strict=True)
        for steps in measures.steps_behind(reference, prompt, tokens)
    ]
    best = below.count(0) / len(below)
    print(f"fp8 greedy: {best:.3f} are the likeliest, the worst is {max(below):.1f} steps below")
    assert best > 0.9
