"""A grammar in plain Python through the engine: masks hold on every road, on CPU and card."""

import pytest
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams, StructuredOutputsParams

VOCAB, EOS = 320, (1, 2)
LEAST, MOST = 6, 30
"""Tokens that a completion has, EOS apart."""


class Remainders:
    """The k-th token is k modulo 7; from LEAST tokens on it may end, at MOST it must."""

    def of_request(self):
        return self

    def matcher(self, end_token_ids):
        assert end_token_ids == {*EOS}
        return RemainderMatcher()


class RemainderMatcher:
    def __init__(self):
        self.count = 0

    def accept(self, token_ids):
        for token in token_ids:
            if token not in self.following():
                return f"token {token} does not fit"
            self.count += 1
        return None

    def following(self):
        ids = [] if self.count == MOST else range(7 + self.count % 7, VOCAB, 7)
        return {*ids, *(EOS if self.count >= LEAST else ())}

    def mask(self, unwanted):
        ids = self.following() - {*unwanted} or self.following()
        return sum(1 << token for token in ids).to_bytes(VOCAB // 8, "little")

    def reset(self):
        self.count = 0


def bound(**more):
    """Parameters of a completion with the grammar; what is asked for in words is not looked at."""
    asked = StructuredOutputsParams(regex="remainders")
    return SamplingParams(**{"max_tokens": 99, "structured_outputs": asked} | more)


PROMPTS = [
    [(7 * row + 3 * position) % 300 + 5 for position in range(20 + 5 * row)] for row in range(6)
]
REQUESTS = [
    bound(seed=1),
    SamplingParams(seed=2, max_tokens=30, ignore_eos=True),
    bound(seed=3, n=3, temperature=1.5, top_p=0.9),
    bound(temperature=0, ignore_eos=True, frequency_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    bound(seed=4, min_tokens=12, logit_bias=dict.fromkeys(EOS, 50.0)),
]


def run(checkpoint, **options):
    """(tokens, finish_reason, stop_reason) by request and completion."""
    sizes = {"max_model_len": 256, "kvcache_block_size": 16, "max_num_seqs": 8}
    sizes["gpu_memory_utilization"] = 0.3  # a card may be shared
    engine = Engine(EngineConfig(model=str(checkpoint), dtype="float32", **sizes | options))
    for prompt, params in zip(PROMPTS, REQUESTS, strict=True):
        engine.add(
            EngineRequest(prompt, params, Remainders() if params.structured_outputs else None)
        )
    tokens, ends = {}, {}
    while engine.has_unfinished:
        for update in engine.step().updates:
            key = update.request_id, update.index
            tokens.setdefault(key, []).extend(update.token_ids)
            ends[key] = update.finish_reason, update.stop_reason
    metrics = engine.metrics
    engine.close()
    assert metrics.num_free_blocks == metrics.num_blocks
    assert (metrics.num_preemptions > 0) == ("num_kvcache_blocks" in options)
    return {key: (tokens[key], *ends[key]) for key in sorted(tokens)}


@pytest.fixture(scope="module")
def plain(checkpoint):
    return run(checkpoint, device="cpu", max_in_flight=0)


ROADS = [
    {"max_in_flight": 0},
    {"max_in_flight": 1, "enforce_eager": True},
    {"max_in_flight": 2, "max_burst": 4},
    {"max_num_batched_tokens": 9},
    {"num_kvcache_blocks": 8},
]


def check(found):
    for (request_id, _), (tokens, finish_reason, stop_reason) in found.items():
        params = REQUESTS[request_id]
        if params.structured_outputs is None:
            assert (len(tokens), finish_reason) == (30, "length")
            continue
        assert (finish_reason, stop_reason) == ("stop", None)
        *drawn, eos = tokens
        assert eos in EOS
        assert [token % 7 for token in drawn] == [k % 7 for k in range(len(drawn))]
        least = MOST if params.ignore_eos else max(LEAST, params.min_tokens)
        assert least <= len(drawn) <= MOST
    assert len(found[5, 0][0]) == 13  # EOS as soon as min_tokens lets it


@pytest.mark.parametrize("options", ROADS, ids=str)
def test_masks_hold_on_every_road(checkpoint, plain, options):
    found = run(checkpoint, device="cpu", **options)
    check(found)
    assert found == plain


@pytest.mark.gpu
@pytest.mark.parametrize("options", ROADS, ids=str)
def test_masks_hold_on_the_card(checkpoint, options):
    check(run(checkpoint, device="cuda", **options))
