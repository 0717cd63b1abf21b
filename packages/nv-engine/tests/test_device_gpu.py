"""The engine on a card: the same tokens as on the CPU, whatever the road there.

Marked gpu. In fp32 ids are equal; in bf16 they may part only where the two best logits are closer
than bf16 resolves, which is looked up in fp32.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.gpu
NUM_TOKENS = 40
TIE = 0.06  # logits of the tiny model span about +-8, where bf16 steps are 2**-5


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(3, 320) for _ in range(70)]
    own = [[rng.randrange(3, 320) for _ in range(rng.randint(1, 60))] for _ in range(12)]
    return [(shared if index % 3 == 0 else []) + ids for index, ids in enumerate(own)]


def run(
    checkpoint: Path, prompts: list[list[int]], params: SamplingParams, **options: object
) -> list[list[int]]:
    defaults = {"max_num_seqs": 16, "kvcache_block_size": 64, "num_kvcache_blocks": 200}
    engine = Engine(EngineConfig(model=str(checkpoint), **defaults | options))
    ids = [engine.add(EngineRequest(prompt, params)) for prompt in prompts]
    tokens: dict[int, list[int]] = {request: [] for request in ids}
    while engine.has_unfinished:
        for update in engine.step().updates:
            tokens[update.request_id].extend(update.token_ids)
    metrics = engine.metrics
    assert metrics.num_free_blocks == metrics.num_blocks
    engine.close()
    return [tokens[request] for request in ids]


def first_difference(left: list[int], right: list[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)


def assert_equal_up_to_ties(
    checkpoint: Path, prompts: list[list[int]], left: list[list[int]], right: list[list[int]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for prompt, a, b in zip(prompts, left, right, strict=True):
        index = first_difference(a, b)
        if index is None:
            continue
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + a[:index]])).logits[0, -1]
        gap = abs(float(logits[a[index]] - logits[b[index]]))
        assert gap < TIE, (index, gap, a[index], b[index])


GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
ROADS = {
    "eager": {"enforce_eager": True},
    "graphs": {},
    "synchronous": {"max_in_flight": 0},
    "deep": {"max_in_flight": 3},
    "burst": {"max_burst": 8},
    "squeezed": {"num_kvcache_blocks": 9, "max_num_batched_tokens": 64},
    "small blocks": {"kvcache_block_size": 16, "num_kvcache_blocks": 400},
    "flash": {"kvcache_block_size": 256, "num_kvcache_blocks": 40},
}


@pytest.fixture(scope="module")
def expected(checkpoint: Path, prompts: list[list[int]]) -> list[list[int]]:
    return run(checkpoint, prompts, GREEDY, device="cpu")


@pytest.mark.parametrize("road", ROADS)
def test_fp32_greedy_equals_the_cpu(checkpoint, prompts, expected, road) -> None:
    got = run(checkpoint, prompts, GREEDY, device="cuda", dtype="float32", **ROADS[road])
    assert got == expected


@pytest.mark.parametrize("road", ["eager", "graphs", "deep", "burst"])
def test_n15_sequences_that_fill_max_model_len(checkpoint, road) -> None:
    rng, limit = random.Random(15), {"max_model_len": 64}
    prompts = [[rng.randrange(3, 320) for _ in range(length)] for length in (63, 62, 40, 5)]
    want = run(checkpoint, prompts, GREEDY, device="cpu", **limit)
    assert list(map(len, want)) == [1, 2, 24, NUM_TOKENS]
    assert run(checkpoint, prompts, GREEDY, dtype="float32", **limit, **ROADS[road]) == want


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("road", ROADS)
def test_16_bit_greedy_up_to_ties(checkpoint, prompts, expected, road, dtype) -> None:
    got = run(checkpoint, prompts, GREEDY, device="cuda", dtype=dtype, **ROADS[road])
    assert_equal_up_to_ties(checkpoint, prompts, got, expected)


@pytest.mark.parametrize("road", ROADS)
def test_fp32_seeded_draws_equal_the_cpu(checkpoint, prompts, road) -> None:
    params = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=40, seed=11, max_tokens=16, min_tokens=8
    )
    want = run(checkpoint, prompts, params, device="cpu")
    assert run(checkpoint, prompts, params, dtype="float32", **ROADS[road]) == want


def run_shaped(
    checkpoint: Path, prompts: list[list[int]], **options: object
) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens, and log-probabilities of drawn and prompt tokens, with every control in use."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"bad_words_token_ids": [[a, b] for a in range(3, 40) for b in range(3, 40)]},
        {"allowed_token_ids": list(range(3, 60)), "logit_bias": {5: 3.0}, "min_tokens": 9},
        {"logprobs": 3, "prompt_logprobs": 2, "repetition_penalty": 0.9},
        {"logprobs": 0, "temperature": 0.8, "top_p": 0.9, "seed": 3},
    )
    defaults = {"max_num_seqs": 16, "kvcache_block_size": 64, "num_kvcache_blocks": 200}
    engine = Engine(EngineConfig(model=str(checkpoint), **defaults | options))
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    for index, prompt in enumerate(prompts):
        greedy: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        request = engine.add(
            EngineRequest(prompt, SamplingParams(**greedy | kinds[index % len(kinds)]))
        )
        tokens[request], logprobs[request] = [], []
    while engine.has_unfinished:
        for update in engine.step().updates:
            tokens[update.request_id].extend(update.token_ids)
            for entry in [*(update.prompt_logprobs or ()), *(update.logprobs or ())]:
                logprobs[update.request_id].extend(entry.logprobs)
    engine.close()
    return list(tokens.values()), list(logprobs.values())


@pytest.mark.parametrize("road", ROADS)
def test_fp32_controls_and_logprobs_equal_the_cpu(checkpoint, prompts, road) -> None:
    want_tokens, want_logprobs = run_shaped(checkpoint, prompts, device="cpu")
    tokens, logprobs = run_shaped(checkpoint, prompts, dtype="float32", **ROADS[road])
    assert tokens == want_tokens
    for got, want in zip(logprobs, want_logprobs, strict=True):
        assert got == pytest.approx(want, abs=1e-3)


def test_measured_pool_fits_with_other_memory_in_use(checkpoint, prompts) -> None:
    other = torch.empty(20 * 2**30, dtype=torch.uint8, device="cuda")
    engine = Engine(
        EngineConfig(
            model=str(checkpoint), dtype="bfloat16", gpu_memory_utilization=0.4, max_num_seqs=256
        )
    )
    total = torch.cuda.get_device_properties(0).total_memory
    params = SamplingParams(temperature=1, top_p=0.9, max_tokens=8, ignore_eos=True)
    for index in range(256):
        engine.add(EngineRequest([index % 300 + 3] * 60, params))
    while engine.has_unfinished:
        engine.step()
    assert torch.cuda.memory_reserved() - other.numel() < 0.42 * total
    engine.close()


def test_a_share_that_is_not_free_is_refused(checkpoint) -> None:
    other = torch.empty(50 * 2**30, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        Engine(EngineConfig(model=str(checkpoint), gpu_memory_utilization=1.0))
    del other


def test_failed_capture_runs_eagerly_with_a_warning(
    checkpoint, prompts, expected, monkeypatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no graphs today")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", fail)
    with pytest.warns(UserWarning, match="no graphs today"):
        got = run(checkpoint, prompts, GREEDY, dtype="bfloat16")
    assert_equal_up_to_ties(checkpoint, prompts, got, expected)
