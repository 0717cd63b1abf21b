"""The trained checkpoint on a CPU: nv computes what transformers computes, and fp8 costs little."""

import measures
import pytest
import test_device_gpu as roads
import torch
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def reference(trained):
    return AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reference_logprobs(reference, passages):
    return measures.reference_logprobs(reference, passages)


def test_the_weights_are_not_noise(reference_logprobs):
    """One that has learned nothing is at 256, one that knows how often each byte comes at 23."""
    assert measures.perplexity(reference_logprobs) < 6


def test_fp32_perplexity_is_transformers(trained, passages, reference_logprobs):
    said = measures.text_logprobs(trained, passages, device="cpu", dtype="float32")
    assert measures.perplexity(said) == pytest.approx(
        measures.perplexity(reference_logprobs), abs=1e-3
    )
    assert said == pytest.approx(reference_logprobs, abs=1e-3)


def test_fp32_greedy_is_transformers(trained, prompts, reference):
    got = roads.run(trained, prompts, roads.GREEDY, device="cpu", dtype="float32")
    for prompt, tokens in zip(prompts, got, strict=True):
        assert max(measures.steps_behind(reference, prompt, tokens)) == 0


def test_bf16_is_as_near_to_fp32_as_transformers_is(trained, passages, reference_logprobs):
    rounded = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.bfloat16).eval()
    theirs = measures.distance(measures.reference_logprobs(rounded, passages), reference_logprobs)
    said = measures.text_logprobs(trained, passages, device="cpu", dtype="bfloat16")
    ours = measures.distance(said, reference_logprobs)
    print(f"mean distance from fp32, nats: nv {ours:.5f}, transformers {theirs:.5f}")
    assert ours < 1.5 * theirs


def test_an_fp8_cache_costs_little(trained, passages):
    options = {"device": "cpu", "dtype": "bfloat16", "max_num_batched_tokens": 64}
    plain = measures.text_logprobs(trained, passages, **options)
    fp8 = measures.text_logprobs(trained, passages, kv_cache_dtype="fp8", **options)
    ratio = measures.perplexity(fp8) / measures.perplexity(plain)
    print(f"fp8 / bf16 perplexity {ratio:.5f}, distance {measures.distance(fp8, plain):.5f} nats")
    assert measures.distance(fp8, plain) > 0
    assert 0.98 < ratio < 1.02
