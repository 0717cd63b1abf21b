"""Deterministic mode on a card: the same bits alone and in any company, whatever the road.

Marked gpu. What the CPU promises is tested through nv_api.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams

pytestmark = pytest.mark.gpu

Said = tuple[list[int], list[tuple[list[int], list[float], int]]]
DEFAULTS: dict[str, Any] = {
    "device": "cuda",
    "max_num_seqs": 24,
    "kvcache_block_size": 64,
    "num_kvcache_blocks": 300,
    "deterministic": True,
}
ROADS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "synchronous": {"max_in_flight": 0},
    "deep": {"max_in_flight": 3},
    "burst": {"max_burst": 8},
    "chunked": {"max_num_batched_tokens": 24},
    "squeezed": {"num_kvcache_blocks": 14, "max_num_batched_tokens": 64},
    "small blocks": {"kvcache_block_size": 16, "num_kvcache_blocks": 800},
    "large blocks": {"kvcache_block_size": 256, "num_kvcache_blocks": 60},
}
MODES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "fp8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}


@pytest.fixture(scope="module")
def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(3)
    shared = [rng.randrange(3, 320) for _ in range(200)]
    sizes = [1, 2, 16, 17, 63, 64, 65, 100, 128, 150, 255, 256, 257, 300, 400]
    prompts = [[rng.randrange(3, 320) for _ in range(size)] for size in sizes]
    prompts += [shared + prompts[3], shared + prompts[7], shared[:130] + prompts[5]]
    kinds: tuple[dict[str, Any], ...] = (
        {"logprobs": 3, "prompt_logprobs": 2},
        {"logprobs": 5},
        {"logprobs": 20, "temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "seed": 4},
    )
    greedy = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    return [
        (prompt, SamplingParams(**greedy | kinds[index % len(kinds)]))
        for index, prompt in enumerate(prompts)
    ]


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[Said]:
    """Tokens of each request, and its log-probabilities exactly."""
    ids = [engine.add(EngineRequest(prompt, params)) for prompt, params in requests]
    said: dict[int, Said] = {request: ([], []) for request in ids}
    while engine.has_unfinished:
        for update in engine.step().updates:
            tokens, logprobs = said[update.request_id]
            tokens.extend(update.token_ids)
            for entry in [*(update.prompt_logprobs or ()), *(update.logprobs or ())]:
                logprobs.append((entry.token_ids, entry.logprobs, entry.rank))
    return [said[request] for request in ids]


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODES[request.param]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, requests: Any, mode: dict[str, Any]) -> list[Said]:
    engine = Engine(EngineConfig(model=str(checkpoint), **DEFAULTS | mode))
    found = []
    for request in requests:
        engine.reset_prefix_cache()
        found += run(engine, [request])
    engine.close()
    return found


@pytest.mark.parametrize("road", ROADS)
def test_company_does_not_matter(checkpoint, requests, mode, expected, road) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint), **DEFAULTS | mode | ROADS[road]))
    assert run(engine, requests) == expected
    order = list(range(len(requests)))
    random.Random(9).shuffle(order)
    again = run(engine, [requests[index] for index in order])  # mostly from the prefix cache
    assert again == [expected[index] for index in order]
    assert (engine.metrics.num_preemptions > 0) == (road == "squeezed")
    engine.close()
