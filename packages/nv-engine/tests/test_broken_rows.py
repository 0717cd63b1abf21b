"""A row whose logits hold NaN ends its own request, with the reason, and leaves no trace."""

import shutil

import pytest
from nv_engine.config import EngineConfig
from nv_engine.engine import Engine
from nv_engine.params import SamplingParams
from nv_engine.request import EngineRequest
from safetensors.torch import load_file, save_file

BAD = 77  # a token whose embedding is NaN: all that follows it is
PLAIN = [[5, 6, 7, 8], list(range(20, 60)), [9], list(range(100, 118))]
BROKEN = [*range(200, 221), BAD, *range(222, 240)]
ROUTES = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 0.8, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "logprobs": -1, "prompt_logprobs": 2},
    {"temperature": 1.0, "n": 3},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 1.0, "logit_bias": {4: 5.0}, "bad_words_token_ids": [[3], [8, 9]]},
    {"temperature": 1.0, "min_tokens": 4},
]
ROADS = [
    {"max_in_flight": 0},
    {"max_in_flight": 2, "max_burst": 4},
    {"max_num_batched_tokens": 24},
]


@pytest.fixture(scope="module")
def damaged(checkpoint, tmp_path_factory):
    """The tiny checkpoint with one damaged row of its embedding."""
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def start(folder, device, **options):
    sizes = {"max_model_len": 128, "kvcache_block_size": 16, "max_num_seqs": 8}
    sizes["num_kvcache_blocks"] = 64  # a card may be shared
    config = EngineConfig(model=str(folder), dtype="float32", device=device, **sizes | options)
    return Engine(config)


def finish(engine):
    """(tokens, log-probabilities, finish_reason, stop_reason) by request and completion."""
    tokens, said, ends = {}, {}, {}
    while engine.has_unfinished:
        for update in engine.step().updates:
            key = update.request_id, update.index
            tokens.setdefault(key, []).extend(update.token_ids)
            said.setdefault(key, []).extend(update.logprobs or ())
            said[key].extend(update.prompt_logprobs or ())
            ends[key] = update.finish_reason, update.stop_reason
    metrics = engine.metrics
    assert metrics.num_free_blocks == metrics.num_blocks
    return {key: (tokens[key], said[key], *ends[key]) for key in tokens}


def check(folder, device, **options):
    """Each route beside plain requests, which give what they give alone; then prefixes of it."""
    rest = {"max_tokens": 10, "ignore_eos": True}
    engine = start(folder, device, **options)
    for prompt in PLAIN:
        engine.add(EngineRequest(prompt, SamplingParams(seed=3, **rest)))
    alone = [result[0] for result in finish(engine).values()]
    for route in ROUTES:
        plain = [
            engine.add(EngineRequest(prompt, SamplingParams(seed=3, **rest)))
            for prompt in PLAIN[:2]
        ]
        broken = engine.add(EngineRequest(BROKEN, SamplingParams(**rest | route)))
        plain += [
            engine.add(EngineRequest(prompt, SamplingParams(seed=3, **rest)))
            for prompt in PLAIN[2:]
        ]
        found = finish(engine)
        assert [found[request, 0][0] for request in plain] == alone
        for index in range(route.get("n", 1)):
            tokens, said, finish_reason, stop_reason = found[broken, index]
            assert (tokens, said, finish_reason) == ([], [], "error")
            assert stop_reason.startswith("the logits of this sequence hold NaN or infinity: ")
            named = [name for name in ("repetition_penalty", "logit_bias") if name in route]
            assert all(name in stop_reason for name in named)
    # What a damaged sequence drew before counts, also in a burst.
    late = engine.add(
        EngineRequest([5, 6], SamplingParams(allowed_token_ids=[BAD], logprobs=0, **rest))
    )
    tokens, said, finish_reason, _ = finish(engine)[late, 0]
    assert (tokens, [each.token_ids for each in said], finish_reason) == ([BAD], [[BAD]], "error")
    # Nothing after the damage is found by a later request; what is before it may be.
    engine.add(EngineRequest([*BROKEN[:40], 5], SamplingParams(**rest)))
    (update,) = [u for _ in range(9) if engine.has_unfinished for u in engine.step().updates][:1]
    assert update.num_cached_tokens <= 16
    assert update.finish_reason == "error"
    sound = engine.add(EngineRequest([*BROKEN[:21], 5, 6], SamplingParams(seed=3, **rest)))
    fresh = start(folder, device, **options)
    fresh.add(EngineRequest([*BROKEN[:21], 5, 6], SamplingParams(seed=3, **rest)))
    assert finish(engine)[sound, 0][0] == finish(fresh)[0, 0][0]
    engine.close()
    fresh.close()


@pytest.mark.parametrize("options", ROADS, ids=str)
def test_a_damaged_row_ends_its_own_request_alone(damaged, options):
    check(damaged, "cpu", **options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [*ROADS, {"enforce_eager": True}, {"deterministic": True}], ids=str
)
def test_a_damaged_row_ends_its_own_request_alone_on_a_card(damaged, options):
    check(damaged, "cuda", **options)


def test_log_probabilities_are_finite_where_a_control_hides_the_damage(checkpoint, tmp_path):
    """One output is NaN: a draw that may not take it goes on, a softmax cannot."""
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"][BAD] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    engine = start(tmp_path, "cpu")
    hidden = {"allowed_token_ids": [5, 6, 7], "max_tokens": 4, "temperature": 0.0}
    for more in ({}, {"logprobs": 1}, {"prompt_logprobs": 0}):
        engine.add(EngineRequest([9, 8, 7], SamplingParams(**hidden, **more)))
    plain, drawn, prompt = finish(engine).values()
    assert (len(plain[0]), plain[2]) == (4, "length")
    for tokens, said, finish_reason, stop_reason in (drawn, prompt):
        assert (tokens, said, finish_reason) == ([], [], "error")
        assert "NaN" in stop_reason
    engine.close()
