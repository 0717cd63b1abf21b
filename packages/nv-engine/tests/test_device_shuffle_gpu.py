"""Shuffle and squeeze on a card: every control at once, in any order, company, pool and depth.

Marked gpu. In deterministic mode tokens and log-probabilities are bitwise equal. The plain requests
of test_deterministic_gpu.py are tested there.
"""

import random
from typing import Any

import pytest
from nv_engine import Engine, EngineConfig, SamplingParams
from test_deterministic_gpu import DEFAULTS, Said, run

pytestmark = pytest.mark.gpu
OPTIONS: dict[str, Any] = DEFAULTS | {"dtype": "bfloat16"}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 5},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4, "top_p": 0.9},
    {"bad_words_token_ids": [[a, b] for a in range(3, 40) for b in range(3, 40)], "top_k": 30},
    {"allowed_token_ids": list(range(3, 90)), "logit_bias": {5: 2.0, 70: -1.0}, "logprobs": 0},
    {"min_tokens": 20, "min_p": 0.02, "temperature": 1.4},
    {"top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.3, "logprobs": 3},
    {},
)
ROADS: dict[str, dict[str, Any]] = {
    "one by one": {"max_num_seqs": 1},
    "few": {"max_num_seqs": 5, "max_in_flight": 2},
    "squeezed, deep, chunked": {
        "num_kvcache_blocks": 11,
        "max_in_flight": 3,
        "max_num_batched_tokens": 48,
    },
    "squeezed, synchronous": {"num_kvcache_blocks": 11, "max_in_flight": 0},
    "burst": {"max_burst": 4},
}


@pytest.fixture(scope="module")
def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(5)
    made = []
    for index in range(21):
        prompt = [rng.randrange(3, 320) for _ in range(rng.choice([1, 30, 64, 100, 130]))]
        kind = {"seed": 100 + index, "max_tokens": 36, **KINDS[index % len(KINDS)]}
        made.append((prompt, SamplingParams(**kind)))
    return made


@pytest.fixture(scope="module")
def expected(checkpoint: Any, requests: Any) -> list[Said]:
    engine = Engine(EngineConfig(model=str(checkpoint), **OPTIONS))
    found = run(engine, requests)
    engine.close()
    return found


@pytest.mark.parametrize("road", ROADS)
def test_any_order_company_pool_and_depth(checkpoint, requests, expected, road) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint), **OPTIONS | ROADS[road]))
    order = random.Random(road).sample(range(len(requests)), len(requests))
    assert run(engine, [requests[index] for index in order]) == [expected[i] for i in order]
    half = order[::2]
    assert run(engine, [requests[index] for index in half]) == [expected[i] for i in half]
    assert (engine.metrics.num_preemptions > 0) == ("squeezed" in road)
    engine.close()
