"""Log-probabilities out of the engine against transformers' log_softmax, however it is driven."""

from itertools import pairwise

import pytest
import torch
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams
from nv_engine.device.logprobs import row_parts
from transformers import AutoModelForCausalLM

VOCAB = 320
PROMPTS = [[(7 * row + 3 * at) % 300 + 5 for at in range(20 + 5 * row)] for row in range(4)]
ROADS = [
    {"max_in_flight": 0},
    {"max_in_flight": 2, "max_burst": 4},
    {"max_num_batched_tokens": 7},
    {"num_kvcache_blocks": 7},
]


@pytest.fixture(scope="module")
def truth(checkpoint):
    """Log-probabilities [length, V] of what follows each token."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def log_softmax(token_ids):
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)

    return log_softmax


def run(checkpoint, requests, **options):
    """(tokens, logprobs, prompt_logprobs) of each completion, and the engine's metrics."""
    settings = {"max_model_len": 256, "kvcache_block_size": 16, "device": "cpu", "max_num_seqs": 8}
    engine = Engine(EngineConfig(model=str(checkpoint), **{**settings, **options}))
    found = {}
    for prompt, params in requests:
        request_id = engine.add(EngineRequest(prompt, params))
        found |= {(request_id, index): [[], [], None] for index in range(params.n)}
    while engine.has_unfinished:
        for update in engine.step().updates:
            entry = found[update.request_id, update.index]
            entry[0] += update.token_ids
            entry[1] += update.logprobs or []
            if update.prompt_logprobs is not None:
                assert entry[2] is None, "given out twice"
                entry[2] = update.prompt_logprobs
    metrics = engine.metrics
    engine.close()
    assert metrics.num_free_blocks == metrics.num_blocks
    return list(found.values()), metrics


def check(said, logprobs_NV, token_ids, num):
    """Entries against rows of log-probabilities."""
    assert len(said) == len(token_ids)
    for entry, row_V, token in zip(said, logprobs_NV, token_ids, strict=True):
        assert entry.token_ids[0] == token
        assert len(entry.token_ids) == len(entry.logprobs) == num + 1
        torch.testing.assert_close(
            torch.tensor(entry.logprobs), row_V[entry.token_ids], atol=2e-5, rtol=1e-5
        )
        assert entry.rank == 1 + int((row_V > row_V[token]).sum())
        assert set(entry.token_ids[1:]) == set(row_V.topk(num).indices.tolist())
        assert all(a >= b for a, b in pairwise(entry.logprobs[1:]))


@pytest.mark.parametrize("options", ROADS, ids=str)
def test_n39_logprobs_are_of_the_raw_logits(checkpoint, truth, options):
    kinds = [
        {"logprobs": 3, "temperature": 0.5, "top_k": 2},
        {"logprobs": 0, "repetition_penalty": 1.5, "logit_bias": {9: 20.0}},
        {},
        {"logprobs": -1, "temperature": 2.0},
    ]
    requests = [
        (prompt, SamplingParams(seed=5, max_tokens=30, ignore_eos=True, **kind))
        for prompt, kind in zip(PROMPTS, kinds, strict=True)
    ]
    found, metrics = run(checkpoint, requests, **options)
    assert (metrics.num_preemptions > 0) == ("num_kvcache_blocks" in options)
    for (prompt, params), (tokens, said, _) in zip(requests, found, strict=True):
        assert len(tokens) == 30
        if params.logprobs is None:
            assert said == []
            continue
        logprobs = truth(prompt + tokens)[len(prompt) - 1 : -1]
        check(said, logprobs, tokens, VOCAB if params.logprobs == -1 else params.logprobs)


@pytest.mark.parametrize("options", [*ROADS, {"enable_prefix_caching": False}], ids=str)
def test_prompt_logprobs_of_chunked_and_cached_prompts(checkpoint, truth, options):
    prompts = [*PROMPTS, PROMPTS[3], [7]]  # one is cached, at the latest when it comes again
    kinds = [None, 2, 0, 2, 2, 3]
    requests = [
        (
            prompt,
            SamplingParams(
                temperature=0, max_tokens=25, ignore_eos=True, prompt_logprobs=num, n=1 + (num == 0)
            ),
        )
        for prompt, num in zip(prompts, kinds, strict=True)
    ]
    found, _ = run(checkpoint, requests, **options)
    (copy,) = [entry for number, entry in enumerate(found) if number == 3]
    assert copy[2] is None  # completion 1 of n 2: the prompt's are given once
    del found[3]
    for (prompt, params), (tokens, said, prompt_said) in zip(requests, found, strict=True):
        assert said == []
        assert len(tokens) == 25
        if params.prompt_logprobs is None:
            assert prompt_said is None
        else:
            check(prompt_said, truth(prompt)[:-1], prompt[1:], params.prompt_logprobs)


def test_a_cached_prompt_is_computed_for_its_logprobs_alone(checkpoint):
    settings = {"max_model_len": 256, "kvcache_block_size": 16, "device": "cpu"}
    engine = Engine(EngineConfig(model=str(checkpoint), **settings))
    cached = []
    for num in (None, 1, None):
        params = SamplingParams(max_tokens=1, prompt_logprobs=num)
        engine.add(EngineRequest(PROMPTS[3], params))
        while engine.has_unfinished:
            cached += [update.num_cached_tokens for update in engine.step().updates]
    assert cached == [0, 0, 32]
    engine.close()


def test_logprobs_end_where_the_tokens_do(checkpoint):
    """A burst draws past a stop token: those log-probabilities are dropped with the tokens."""
    free = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    ((tokens, _, _),), _ = run(checkpoint, [(PROMPTS[0], free)])
    stop = tokens[9]
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[stop], logprobs=1
    )
    for options in ROADS[:2]:
        ((got, said, _),), _ = run(checkpoint, [(PROMPTS[0], params)], **options)
        assert got == tokens[: tokens.index(stop) + 1]
        assert [entry.token_ids[0] for entry in said] == got


def test_parts_of_rows_are_small():
    assert [part.indices(5) for part in row_parts(5, 2**23)] == [
        (0, 2, 1),
        (2, 4, 1),
        (4, 5, 1),
    ]
    assert len(list(row_parts(3, 2**30))) == 3
