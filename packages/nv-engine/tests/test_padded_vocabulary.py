"""Ids past the tokenizer's: drawn for the requests that name them, and for no others."""

import pytest
from nv_engine.config import EngineConfig
from nv_engine.device.start import num_ids
from nv_engine.engine import Engine
from nv_engine.params import SamplingParams
from nv_engine.request import EngineRequest

KNOWN, VOCAB = 150, 320
PROMPTS = [[5, 6, 7], list(range(20, 45)), [200, 300, 9], [4]]
HOT = {"temperature": 50.0}  # close to equal chances
ROUTES = [
    {"temperature": 0.0},
    HOT,
    {**HOT, "top_k": 310},
    {**HOT, "top_k": 40, "top_p": 0.9},
    {**HOT, "min_p": 0.5},
    {**HOT, "logprobs": -1},
    {**HOT, "presence_penalty": 2.0, "repetition_penalty": 1.5},
    {**HOT, "logit_bias": {KNOWN: -1.0, 7: 1.0}, "bad_words_token_ids": [[3]]},
    {**HOT, "min_tokens": 5, "stop_token_ids": [KNOWN + 9], "ignore_eos": False},
]
NAMING = [
    {**HOT, "allowed_token_ids": [5, KNOWN, 319]},
    {**HOT, "allowed_token_ids": [KNOWN + 1]},
    {"temperature": 1.0, "logit_bias": {300: 200.0}},
    {**HOT, "logit_bias": {310: 1e4, 311: 1e4, 3: 1e4, 312: -1e4}},
]


def run(checkpoint, requests, device="cpu", **options):
    """The tokens, and the widths and sums of log-probabilities, of each request."""
    sizes = {"max_model_len": 128, "kvcache_block_size": 16, "max_num_seqs": 16}
    sizes |= {"gpu_memory_utilization": 0.3, "dtype": "float32"}
    engine = Engine(EngineConfig(model=str(checkpoint), device=device, **sizes | options))
    tokens = {}
    for index, params in enumerate(requests):
        rest = {"max_tokens": 12, "ignore_eos": True, "seed": index}
        tokens[engine.add(EngineRequest(PROMPTS[index % 4], SamplingParams(**rest | params)))] = []
    while engine.has_unfinished:
        for update in engine.step().updates:
            tokens[update.request_id] += update.token_ids
            assert update.finish_reason in (None, "length", "stop")
            for said in update.logprobs or ():
                assert sorted(said.token_ids[1:]) == list(range(VOCAB))  # of the raw, full row
    engine.close()
    return list(tokens.values())


def check(checkpoint, device, **options):
    sized = {"tokenizer_num_ids": KNOWN, "device": device, **options}
    plain = run(checkpoint, ROUTES, **sized)
    assert all(token < KNOWN for tokens in plain for token in tokens)
    mixed = run(checkpoint, [*ROUTES, *NAMING], **sized)
    assert mixed[: len(ROUTES)] == plain  # bit for bit, whatever the others name
    some, only, biased, several = mixed[len(ROUTES) :]
    assert set(some) <= {5, KNOWN, 319}
    assert max(some) >= KNOWN
    assert set(only) == {KNOWN + 1}
    assert set(biased) == {300}
    assert {310, 311} & set(several) <= set(several) <= {310, 311, 3}


def test_ids_past_the_tokenizers_are_drawn_for_requests_that_name_them(checkpoint):
    check(checkpoint, "cpu")
    check(checkpoint, "cpu", max_in_flight=2, max_burst=4, max_num_batched_tokens=20)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"deterministic": True}], ids=str)
def test_ids_past_the_tokenizers_on_a_card(checkpoint, options):
    check(checkpoint, "cuda", **options)


def test_they_are_drawn_where_every_id_is_known(checkpoint):
    requests = [HOT] * 4
    whole = run(checkpoint, requests)
    assert max(max(tokens) for tokens in whole) >= KNOWN
    assert run(checkpoint, requests, tokenizer_num_ids=VOCAB) == whole
    assert run(checkpoint, requests, tokenizer_num_ids=VOCAB + 9) == whole


@pytest.mark.parametrize(
    ("known", "eos", "end"),
    [(None, (1,), None), (9, (1, 8), 9), (9, (1, 11), 12), (20, (), None), (9, (19,), None)],
)
def test_the_bound(known, eos, end):
    """An EOS past the tokenizer's ids may be drawn: else no text would end."""
    assert num_ids(known, eos, 20) == end


def test_parameters_that_leave_only_ids_past_the_tokenizers_are_refused(checkpoint):
    config = EngineConfig(
        model=str(checkpoint), device="cpu", tokenizer_num_ids=KNOWN, max_model_len=64,
        max_num_seqs=2,
    )  # fmt: skip
    engine = Engine(config)
    every = [[token] for token in range(KNOWN)]
    with pytest.raises(ValueError, match=f"forbid all {KNOWN} tokens"):
        engine.validate(EngineRequest([5], SamplingParams(bad_words_token_ids=every)))
    engine.validate(EngineRequest([5], SamplingParams(bad_words_token_ids=every[1:])))
    engine.validate(
        EngineRequest([5], SamplingParams(bad_words_token_ids=every, logit_bias={KNOWN: 1.0}))
    )
    engine.close()
