"""A request that asks for much costs its neighbours nothing: it is refused, or ends alone."""

import random
from contextlib import suppress

import pytest
import torch
from nv_engine import EngineRequest, limits
from nv_engine.config import EngineConfig
from nv_engine.device import control_tables
from nv_engine.engine import Engine
from nv_engine.grammar import StructuredOutputsParams
from nv_engine.params import SamplingParams

VOCAB = 320
PLAIN = [[5, 6, 7], list(range(20, 60)), [9], [100, 3], [7] * 20, [33], [250, 1, 2]]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"stop": ["a"] * 257}, "stop has 257 strings: at most 256"),
        ({"stop": ["b", "a" * 1025]}, "the longest entry of stop has 1025 characters"),
        ({"stop_token_ids": [3] * 4097}, "stop_token_ids has 4097 ids: at most 4096"),
        (
            {"logit_bias": dict.fromkeys(range(32769), 1.0)},
            "logit_bias has 32769 ids: at most 32768 are taken, so give fewer",
        ),
        ({"bad_words": ["a"] * 2049}, "bad_words has 2049 words: at most 2048"),
        ({"bad_words": ["a" * 1025]}, "the longest entry of bad_words has 1025 characters"),
        ({"bad_words_token_ids": [[3]] * 50_000}, "bad_words_token_ids has 50000 words"),
        ({"bad_words_token_ids": [[3], [4] * 100_000]}, "the longest bad word has 100000 tokens"),
        ({"bad_words_token_ids": [[3], []]}, "an empty entry"),
    ],
)
def test_lists_are_bounded(more, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**more)


def start(checkpoint, device="cpu", **options):
    sizes = {"max_model_len": 128, "kvcache_block_size": 16, "max_num_seqs": 8}
    sizes |= {"gpu_memory_utilization": 0.3, "dtype": "float32", "device": device}
    return Engine(EngineConfig(model=str(checkpoint), **sizes | options))


@pytest.fixture
def engine(checkpoint):
    engine = start(checkpoint)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("more", "prompt", "message"),
    [
        ({"allowed_token_ids": [3] * 321}, [5], "allowed_token_ids has 321 ids"),
        (
            {"logprobs": -1, "n": 5000, "max_tokens": 100},
            [5],
            "logprobs is -1, which for 500000 tokens are 160500000 log-probabilities",
        ),
    ],
)
def test_what_depends_on_the_model_is_bounded(engine, more, prompt, message):
    with pytest.raises(ValueError, match=message):
        engine.add(EngineRequest(prompt, SamplingParams(**more)))
    assert not engine.has_unfinished


def test_prompt_log_probabilities_are_bounded(engine, monkeypatch):
    monkeypatch.setattr(limits, "MAX_LOGPROBS", 1000)
    engine.validate(EngineRequest([5] * 3, SamplingParams(prompt_logprobs=-1)))
    with pytest.raises(ValueError, match="prompt_logprobs is 99, which for 11 tokens are 1100"):
        engine.validate(EngineRequest([5] * 11, SamplingParams(prompt_logprobs=99)))


def hostile(generator):
    """Parameters at a bound, past it, or of a kind that costs something; and a prompt."""
    ids = lambda count: [generator.randrange(VOCAB) for _ in range(count)]  # noqa: E731
    count = generator.choice([1, 2, 60, 320, 2048])
    longest = generator.choice([1, 2, 63, 64])
    kinds = {
        "bad_words_token_ids": [ids(generator.randint(1, longest)) for _ in range(count)],
        "stop_token_ids": ids(generator.choice([1, 20, 4096, 5000])),
        "logit_bias": {token: generator.uniform(-3e38, 3e38) for token in ids(200)},
        "allowed_token_ids": ids(generator.choice([1, 5, 300])),
        "logprobs": generator.choice([0, 5, 200, -1]),
        "prompt_logprobs": generator.choice([0, 5, 200, -1]),
        "n": generator.choice([1, 2, 9]),
        "min_tokens": generator.choice([0, 3, 10]),
        "frequency_penalty": generator.choice([-2.0, 2.0]),
        "repetition_penalty": generator.choice([1e-30, 1e30]),
        "temperature": generator.choice([0.0, 1e-30, 1e30]),
        "top_k": generator.choice([1, 319, 2**31 - 1]),
        "top_p": generator.choice([1e-46, 0.5]),
        "min_p": generator.choice([1e-46, 1.0]),
        "seed": generator.choice([-(2**63), 2**64 - 1]),
    }
    chosen = generator.sample(sorted(kinds), generator.randint(1, 5))
    return ids(generator.choice([1, 40, 126])), {name: kinds[name] for name in chosen}


def tokens_beside(engine, add_hostile):
    """The tokens of the seven plain requests, and how many others ended with an error."""
    tokens, num_errors = {}, 0
    for index, prompt in enumerate(PLAIN):
        if index == 4:
            add_hostile()
        params = SamplingParams(max_tokens=9, ignore_eos=True, seed=index)
        tokens[engine.add(EngineRequest(prompt, params))] = []
    while engine.has_unfinished:
        for update in engine.step().updates:
            if update.request_id in tokens:
                tokens[update.request_id] += update.token_ids
                assert update.finish_reason in (None, "length")
            num_errors += update.finish_reason == "error"
    assert engine.metrics.num_free_blocks == engine.metrics.num_blocks
    return list(tokens.values()), num_errors


def check_hostile(engine, count):
    plain, _ = tokens_beside(engine, lambda: None)
    for seed in range(count):
        prompt, more = hostile(random.Random(seed))

        def add(prompt=prompt, more=more):
            with suppress(ValueError):  # refused: nothing runs
                engine.add(EngineRequest(prompt, SamplingParams(**{"max_tokens": 10, **more})))

        assert tokens_beside(engine, add)[0] == plain, more


def test_a_hostile_request_never_changes_its_neighbours_tokens(engine):
    check_hostile(engine, 25)


@pytest.mark.gpu
def test_a_hostile_request_never_changes_its_neighbours_tokens_on_a_card(checkpoint):
    engine = start(checkpoint, "cuda")
    check_hostile(engine, 100)
    engine.close()


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 12}], ids=str)
@pytest.mark.parametrize("name", ["words", "counts", "allowed", "bias_ids"])
def test_a_table_that_cannot_grow_ends_its_own_request_alone(
    checkpoint, monkeypatch, name, options
):
    more = {
        "bad_words_token_ids": [[3, 4]], "frequency_penalty": 1.0, "allowed_token_ids": [3, 4],
        "logit_bias": {3: 1.0},
    }  # fmt: skip
    engine = start(checkpoint, **options)
    plain, _ = tokens_beside(engine, lambda: None)
    tables = engine.executor._runner._head.tables.controls
    fit = control_tables.SlotTable.fit

    def refuse(table, slot, *shape):
        if table is getattr(tables, name):
            raise torch.OutOfMemoryError("out of memory")
        fit(table, slot, *shape)

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(control_tables.SlotTable, "fit", refuse)
            add = lambda: engine.add(EngineRequest([5] * 30, SamplingParams(**more)))  # noqa: E731
            assert tokens_beside(engine, add) == (plain, 1)
        assert tokens_beside(engine, add) == (plain, 0)
    engine.close()


class Failing:
    """A grammar whose matcher raises at its n-th mask or tokens."""

    def __init__(self, at, where):
        self.at, self.where = at, where

    def of_request(self):
        return self

    def matcher(self, end_token_ids):
        return self

    def reset(self):
        pass

    def _count(self, where):
        if where == self.where:
            self.at -= 1
            if self.at == 0:
                raise RuntimeError("too many expressions")

    def accept(self, token_ids):
        if token_ids:
            self._count("accept")

    def mask(self, unwanted):
        self._count("mask")
        return b"\xff" * (VOCAB // 8)


@pytest.mark.parametrize("where", ["mask", "accept"])
@pytest.mark.parametrize("at", [1, 3])
def test_a_grammar_that_fails_ends_its_own_request_alone(engine, at, where):
    plain, _ = tokens_beside(engine, lambda: None)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a*"))
    found = tokens_beside(
        engine, lambda: engine.add(EngineRequest([5], params, Failing(at, where)))
    )
    assert found == (plain, 1)
