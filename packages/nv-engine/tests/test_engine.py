"""The engine on a real model: tokens do not depend on how the work was cut."""

import pytest
from nv_engine.config import EngineConfig
from nv_engine.engine import Engine
from nv_engine.params import SamplingParams


def run(checkpoint, prompts, params, **options):
    """Completions in order of arrival, and the engine's metrics at the end."""
    settings = {"max_model_len": 256, "kvcache_block_size": 16, "device": "cpu", "max_num_seqs": 8}
    engine = Engine(EngineConfig(model=str(checkpoint), **{**settings, **options}))
    ids = [engine.add(prompt, params) for prompt in prompts]
    tokens = {request_id: [] for request_id in ids}
    while engine.has_unfinished:
        for update in engine.step().updates:
            tokens[update.request_id] += update.token_ids
    metrics = engine.metrics
    engine.close()
    assert metrics.num_free_blocks == metrics.num_blocks
    return list(tokens.values()), metrics


PROMPTS = [
    [(7 * row + 3 * position) % 300 + 5 for position in range(20 + 5 * row)] for row in range(4)
]


@pytest.mark.parametrize(
    "options",
    [
        {"max_in_flight": 0},
        {"max_in_flight": 1},
        {"max_in_flight": 2, "max_burst": 4},
        {"max_num_batched_tokens": 7},
        {"num_kvcache_blocks": 7},
        {"enable_prefix_caching": False, "kvcache_block_size": 64},
    ],
    ids=str,
)
def test_greedy_tokens_equal_transformers(checkpoint, greedy, options):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [*PROMPTS, PROMPTS[3]]
    got, metrics = run(checkpoint, prompts, params, **options)
    assert got == [greedy(prompt, 24) for prompt in prompts]
    assert (metrics.num_preemptions > 0) == ("num_kvcache_blocks" in options)


def test_n33_a_seeded_draw_depends_on_nobody(checkpoint):
    params = SamplingParams(seed=42, max_tokens=24, ignore_eos=True)
    alone, _ = run(checkpoint, PROMPTS[:1], params)
    for options in ({}, {"num_kvcache_blocks": 7}, {"max_in_flight": 0, "max_burst": 3}):
        assert run(checkpoint, PROMPTS, params, **options)[0][:1] == alone
        assert run(checkpoint, PROMPTS[::-1], params, **options)[0][-1:] == alone
