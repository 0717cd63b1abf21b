"""The engine on a real model: tokens do not depend on how the work was cut."""

from itertools import pairwise

import pytest
import torch
from nv_engine.config import EngineConfig
from nv_engine.device import draw_head
from nv_engine.engine import Engine
from nv_engine.params import SamplingParams
from nv_engine.request import EngineRequest
from nv_engine.scheduling.draw_key import draw_key
from nv_engine.scheduling.sequence import Sequence
from transformers import AutoModelForCausalLM


def run(checkpoint, prompts, params, **options):
    """Completions in order of arrival, and the engine's metrics at the end."""
    settings = {"max_model_len": 256, "kvcache_block_size": 16, "device": "cpu", "max_num_seqs": 8}
    engine = Engine(EngineConfig(model=str(checkpoint), **{**settings, **options}))
    ids = [engine.add(EngineRequest(prompt, params)) for prompt in prompts]
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


@pytest.mark.parametrize("length", [1, 16, 17, 45])
def test_n_completions_are_n_requests_with_the_derived_keys(checkpoint, length):
    """Sharing the prompt's blocks changes nothing: each against one that computes it alone."""
    prompt = [(3 * position) % 300 + 5 for position in range(length)]
    params = SamplingParams(seed=7, max_tokens=20, ignore_eos=True, n=4)
    settings = {"device": "cpu", "kvcache_block_size": 16, "enable_prefix_caching": False}
    config = EngineConfig(model=str(checkpoint), max_model_len=256, max_num_seqs=8, **settings)
    engine = Engine(config)
    request_id = engine.add(EngineRequest(prompt, params))
    for index in range(4):  # requests of their own
        sequence = Sequence(
            100 + index, 0, prompt, params, seed=draw_key(7, index), limit=length + 20
        )
        engine._scheduler.add(sequence)
    tokens = {}
    while engine.has_unfinished:
        for update in engine.step().updates:
            tokens.setdefault((update.request_id, update.index), []).extend(update.token_ids)
    shared = [tokens[request_id, index] for index in range(4)]
    assert shared == [tokens[100 + index, 0] for index in range(4)]
    assert len(set(map(tuple, shared))) == 4
    assert engine.metrics.num_prefill_tokens == (length + 3) + 4 * length
    engine.close()


def test_n33_a_seeded_draw_depends_on_no_other(checkpoint):
    params = SamplingParams(seed=42, max_tokens=24, ignore_eos=True)
    alone, _ = run(checkpoint, PROMPTS[:1], params)
    for options in ({}, {"num_kvcache_blocks": 7}, {"max_in_flight": 0, "max_burst": 3}):
        assert run(checkpoint, PROMPTS, params, **options)[0][:1] == alone
        assert run(checkpoint, PROMPTS[::-1], params, **options)[0][-1:] == alone


CONTROLS = {
    "repetition": ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "bias": (
        {"logit_bias": {9: 4.0, 30: -9.0}},
        {"sequence_bias": [[[9], 4.0], [[30], -9.0]]},
    ),
    "allowed": (
        {"allowed_token_ids": list(range(5, 40))},
        {"suppress_tokens": [*range(5), *range(40, 320)]},
    ),
    "min_tokens": (  # N38: neither of the two EOS ids before that
        {"min_tokens": 30, "logit_bias": {1: 30.0, 2: 31.0}},
        {"min_new_tokens": 30, "sequence_bias": [[[1], 30.0], [[2], 31.0]]},
    ),
    "plain": ({}, {}),
}
ROADS = [
    {"max_in_flight": 0},
    {"max_in_flight": 2, "max_burst": 4},
    {"max_num_batched_tokens": 7},
    {"num_kvcache_blocks": 9},
]


def run_each(checkpoint, requests, **options):
    """Tokens of every completion, in order of request and index."""
    settings = {"max_model_len": 256, "kvcache_block_size": 16, "device": "cpu", "max_num_seqs": 16}
    engine = Engine(EngineConfig(model=str(checkpoint), **{**settings, **options}))
    ids = [engine.add(EngineRequest(prompt, params)) for prompt, params in requests]
    tokens = {
        (i, n): [] for i, (_, params) in zip(ids, requests, strict=True) for n in range(params.n)
    }
    while engine.has_unfinished:
        for update in engine.step().updates:
            tokens[update.request_id, update.index] += update.token_ids
    squeezed = engine.metrics.num_preemptions > 0
    engine.close()
    assert squeezed == ("num_kvcache_blocks" in options)
    return list(tokens.values())


@pytest.fixture(scope="module")
def generated(checkpoint):
    """The greedy tokens of transformers under each control, EOS not among the ends."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    found = []
    for prompt, (_, options) in zip(CONTROL_PROMPTS, CONTROLS.values(), strict=True):
        with torch.inference_mode():
            ids = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=40,
                pad_token_id=0,
                **options,
            )
        found.append(ids[0, len(prompt) :].tolist())
    return found


CONTROL_PROMPTS = [*PROMPTS, PROMPTS[2]]


@pytest.mark.parametrize("options", ROADS, ids=str)
def test_controls_in_one_batch_equal_transformers(checkpoint, generated, options):
    requests = [
        (prompt, SamplingParams(temperature=0, max_tokens=40, **fields))
        for prompt, (fields, _) in zip(CONTROL_PROMPTS, CONTROLS.values(), strict=True)
    ]
    assert run_each(checkpoint, requests, **options) == generated


def test_drawn_controls_depend_on_no_other(checkpoint):
    """All at once, with n 2, preempted and overlapped: the draws of a request alone."""
    words = [[token, other] for token in range(5, 50) for other in range(5, 50)]
    fields = (
        {"bad_words_token_ids": words, "temperature": 0.8},
        {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
        {"allowed_token_ids": list(range(5, 60)), "bad_words_token_ids": words[::2], "top_k": 20},
        {"logit_bias": dict.fromkeys(range(100, 140), 3.0), "min_tokens": 9, "top_p": 0.9},
    )
    requests = [
        (prompt, SamplingParams(n=2, seed=4, max_tokens=30, ignore_eos=True, **more))
        for prompt, more in zip(PROMPTS, fields, strict=True)
    ]
    alone = [tokens for request in requests for tokens in run_each(checkpoint, [request])]
    for options in ROADS:
        assert run_each(checkpoint, requests, **options) == alone
    pairs = {(a, b) for tokens in alone[:2] for a, b in pairwise(tokens)}
    assert not pairs & set(map(tuple, words))


def test_a_list_is_admitted_longest_first_and_draws_as_if_added_one_by_one(checkpoint):
    options = {"max_model_len": 256, "kvcache_block_size": 16, "device": "cpu", "max_num_seqs": 1}
    lengths = (3, 9, 5, 9)
    kinds = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]

    def drain(engine):
        tokens, ended = {}, []
        while engine.has_unfinished:
            for update in engine.step().updates:
                tokens.setdefault(update.request_id, []).extend(update.token_ids)
                ended += [update.request_id] if update.finish_reason else []
        engine.close()
        return tokens, ended

    engine = Engine(EngineConfig(model=str(checkpoint), **options))
    with pytest.raises(ValueError, match="vocabulary"):
        engine.add_list([EngineRequest(ids, kinds[0]) for ids in (PROMPTS[0], [5, 10**6])])
    assert not engine.has_unfinished
    engine.close()

    engine = Engine(EngineConfig(model=str(checkpoint), **options))
    ids = engine.add_list(map(EngineRequest, PROMPTS, kinds))
    assert ids == [0, 1, 2, 3]
    listed, ended = drain(engine)
    assert ended == [1, 3, 2, 0]
    engine = Engine(EngineConfig(model=str(checkpoint), **options))
    for prompt, params in zip(PROMPTS, kinds, strict=True):
        engine.add(EngineRequest(prompt, params))
    single, ended = drain(engine)
    assert ended == [0, 1, 2, 3]
    assert single == listed


def test_tokens_are_read_where_they_are_after_a_step_that_failed_late(
    checkpoint, greedy, monkeypatch
):
    """The device has counted a step that the host did not come to expect."""
    options = {"max_model_len": 64, "kvcache_block_size": 16, "num_kvcache_blocks": 8}
    engine = Engine(EngineConfig(model=str(checkpoint), device="cpu", **options))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def fail(*_):
        raise RuntimeError("too little memory for log-probabilities")

    with monkeypatch.context() as patched:
        patched.setattr(draw_head, "prompt_logprobs", fail)
        engine.add(EngineRequest(PROMPTS[0], SamplingParams(prompt_logprobs=1)))
        reasons = [update.finish_reason for update in engine.step().updates]
    assert reasons == ["error"]
    engine.add(EngineRequest(PROMPTS[1], params))
    tokens = []
    while engine.has_unfinished:
        tokens += [token for update in engine.step().updates for token in update.token_ids]
    engine.close()
    assert tokens == greedy(PROMPTS[1], 6)
