"""Pooled prompts equal their definition over transformers' hidden states, however they are run."""

import json
import shutil
from types import SimpleNamespace

import nv_kernels as nk
import pytest
import torch
from nv_engine import Engine, EngineConfig, EngineRequest, PoolingParams
from pooling_ranks import start_ranks
from safetensors.torch import load_file, save_file
from test_broken_rows import BAD
from test_padded_steps import CPU, EagerGraphs
from torch.nn.functional import normalize
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

MAX_LEN = 96
LENGTHS = (1, 40, 16, 5, MAX_LEN, 17)
PROMPTS = [
    [(7 * row + 3 * n) % 300 + 5 for n in range(length)] for row, length in enumerate(LENGTHS)
]
ASKED = [
    PoolingParams(task="embed"),
    PoolingParams(task="embed", dimensions=8),
    PoolingParams(task="token_embed"),
    PoolingParams(task="embed", use_activation=False),
    PoolingParams(task="embed", dimensions=3, use_activation=False),
    PoolingParams(task="token_embed", dimensions=5, normalize=False),
]
ROADS = {
    "at once": {"max_in_flight": 0},
    "in chunks": {"max_num_batched_tokens": 16, "max_in_flight": 2},
    "few slots": {"max_num_seqs": 2, "num_kvcache_blocks": 8},
}
MODES = {"lasttoken": lambda h: h[-1], "mean": lambda h: h.mean(0), "cls": lambda h: h[0]}


def module(index, kind):
    return {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}"}  # fmt: skip


@pytest.fixture(scope="module")
def folders(checkpoint, tmp_path_factory):
    """The tiny checkpoint as a folder of sentence-transformers, one for each mode."""
    made = {}
    for mode in MODES:
        made[mode] = folder = tmp_path_factory.mktemp(mode)
        for file in checkpoint.iterdir():
            (folder / file.name).symlink_to(file)
        kinds = enumerate(["Transformer", "Pooling", "Normalize"])
        (folder / "modules.json").write_text(json.dumps([module(*each) for each in kinds]))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    return made


@pytest.fixture(scope="module")
def states(checkpoint):
    """Hidden states [tokens, E] of a prompt, by transformers."""
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def states_of(prompt):
        with torch.inference_mode():
            return model(torch.tensor([prompt])).last_hidden_state[0]

    return states_of


def truth(states, mode, prompt, params):
    hidden = states(prompt)
    rows = hidden if params.is_of_tokens else MODES[mode](hidden)[None]
    rows = rows[:, : params.dimensions]
    return rows if params.use_activation is False else normalize(rows, dim=-1)


def config_of(folder, **options):
    sizes = {"max_model_len": MAX_LEN, "kvcache_block_size": 16, "num_kvcache_blocks": 40}
    defaults = {"max_num_seqs": 8, "device": "cpu", **sizes}
    return EngineConfig(model=str(folder), **defaults | options)


def start(folder, **options):
    return Engine(config_of(folder, **options))


def pool(engine, prompts, params):
    """The updates of prompts, in their order."""
    asked = [EngineRequest(p, each) for p, each in zip(prompts, params, strict=True)]
    ids, ended = engine.add_list(asked), {}
    while engine.has_unfinished:
        for update in engine.step().updates:
            assert update.request_id not in ended
            ended[update.request_id] = update
    return [ended[each] for each in ids]


def values(update):
    assert update.finish_reason == "stop", update.stop_reason
    rows = torch.frombuffer(bytearray(update.pooled.values), dtype=torch.float32)
    return rows.view(-1, update.pooled.width)


def check(states, mode, updates, prompts=PROMPTS, params=ASKED):
    for update, prompt, each in zip(updates, prompts, params, strict=True):
        want = truth(states, mode, prompt, each)
        torch.testing.assert_close(values(update), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("mode", MODES)
def test_mixed_lengths_and_tasks_equal_the_definition(folders, states, mode, road):
    engine = start(folders[mode], **ROADS[road])
    check(states, mode, pool(engine, PROMPTS, ASKED))
    check(states, mode, pool(engine, PROMPTS[1:2], ASKED[1:2]), PROMPTS[1:2], ASKED[1:2])  # alone
    assert engine.metrics.num_free_blocks == engine.metrics.num_blocks
    assert engine.metrics.num_preemptions == 0  # a prompt waits until there is room for all of it


@pytest.mark.parametrize("mode", MODES)
def test_padded_steps_give_the_same(folders, states, mode, monkeypatch):
    """As graphs run them: padding rows and tokens of no row change nothing, NaN in them neither."""
    from nv_engine.device import start as starting  # noqa: PLC0415
    from nv_engine.device.buckets import Buckets  # noqa: PLC0415
    from nv_engine.device.captured_steps import CapturedSteps  # noqa: PLC0415

    graphs = EagerGraphs(CPU)

    def started(config):
        runner = starting.start_runner(config)
        runner._head.kept[-1] = runner._head.kept.new_tensor(float("nan"))
        runner.use_graphs(CapturedSteps(graphs, Buckets(config.max_num_seqs, MAX_LEN)))
        return runner

    monkeypatch.setattr("nv_engine.executor.local.start_runner", started)
    engine = start(folders[mode], max_num_batched_tokens=64, enable_prefix_caching=False)
    for _ in range(3):
        check(states, mode, pool(engine, PROMPTS, ASKED))
    assert graphs.num_replays > 3


def test_last_token_tasks_use_the_prefix_cache_and_others_compute_all(folders, states):
    shared = [*PROMPTS[4][:80], 7]
    for mode, hits in (("lasttoken", 80), ("mean", 0), ("cls", 0)):
        engine = start(folders[mode])
        pool(engine, PROMPTS, ASKED)
        params = [ASKED[0], ASKED[2]]
        updates = pool(engine, [shared, shared], params)
        assert [update.num_cached_tokens for update in updates] == [hits, 0]
        check(states, mode, updates, [shared, shared], params)


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_that_is_computed_anew_gives_the_same(folders, states, mode):
    """A sum or kept rows of the first attempt would come twice."""
    engine = start(folders[mode], max_num_batched_tokens=16, max_in_flight=0)
    params = [ASKED[0], ASKED[2]]
    asked = [EngineRequest(PROMPTS[4], each) for each in params]
    ids = engine.add_list(asked)
    for _ in range(4):
        assert not engine.step().updates
    engine._recover()
    ended = {}
    while engine.has_unfinished:
        ended |= {update.request_id: update for update in engine.step().updates}
    check(states, mode, [ended[each] for each in ids], [PROMPTS[4]] * 2, params)


@pytest.mark.parametrize("mode", MODES)
def test_an_aborted_prompt_leaves_nothing_to_the_others(folders, states, mode):
    """It has been computed in part; its slot and its sum go to the next prompt."""
    engine = start(folders[mode], max_num_batched_tokens=16, max_num_seqs=1, max_in_flight=2)
    long = EngineRequest([9] * MAX_LEN, ASKED[0])
    request_id = engine.add(long)
    for _ in range(3):
        assert not engine.step().updates
    (update,) = engine.abort(request_id)
    assert (update.finish_reason, update.pooled) == ("abort", None)
    check(states, mode, pool(engine, PROMPTS, ASKED))
    assert engine.metrics.num_free_blocks == engine.metrics.num_blocks


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_with_nan_is_an_error_of_its_own(folders, states, mode, tmp_path):
    folder = shutil.copytree(folders[mode], tmp_path / "damaged")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = start(folder, max_num_batched_tokens=32)
    broken = [9, *range(200, 225), BAD, *range(130, 150)]
    prompts = [PROMPTS[1], broken, PROMPTS[2], broken, broken[:20]]
    params = [ASKED[0], ASKED[0], ASKED[2], ASKED[2], ASKED[0]]
    first, *failed = updates = pool(engine, prompts, params)
    for update in (failed[0], failed[2]):
        assert (update.finish_reason, update.pooled) == ("error", None)
        assert "hidden states of this prompt hold NaN" in update.stop_reason
    sound = [0, 2, 4]
    chosen = [[each[i] for i in sound] for each in (updates, prompts, params)]
    check(states, mode, *chosen)
    assert first.finish_reason == "stop"
    (again,) = pool(engine, [broken[:30]], [ASKED[0]])
    assert again.finish_reason == "error", "what a broken step computed is not published"


def test_neither_head_nor_draw_is_there(folders, states, monkeypatch):
    def never(*_, **__):
        raise AssertionError("a pooling step draws")

    for name in ("sample", "keep_tokens", "logits", "top_logprobs"):
        monkeypatch.setattr(nk, name, never)
    engine = start(folders["lasttoken"])
    assert engine.executor._runner._model.lm_head is None
    check(states, "lasttoken", pool(engine, PROMPTS, ASKED))


@pytest.fixture(scope="module")
def classifiers(checkpoint, tmp_path_factory):
    """By the number of labels: a classifier's folder, and the model in transformers."""
    made = {}
    for num_labels in (3, 1):
        torch.manual_seed(num_labels)
        config = Qwen3Config.from_pretrained(checkpoint, num_labels=num_labels)
        model = Qwen3ForSequenceClassification(config).eval()
        folder = tmp_path_factory.mktemp("classifier")
        model.save_pretrained(folder)
        made[num_labels] = folder, model
    return made


@pytest.fixture
def reranker(checkpoint, tmp_path):
    """The folder whose label is a token of the head against another, and its truth in logits."""
    folder = shutil.copytree(checkpoint, tmp_path / "reranker")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {"model": {"vocab": {"no": 7, "yes": 301}}}  # of the first rank and of the second
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def no_and_yes(ids):
        return SimpleNamespace(logits=model(ids).logits[:, -1, [7, 301]])

    return folder, no_and_yes


@pytest.mark.slow
def test_two_ranks_give_the_same(folders, states, classifiers, reranker):
    """Embeddings, classes and scores, by five models on the same two ranks."""
    models = [folders["mean"], folders["lasttoken"], *(each[0] for each in classifiers.values())]
    models.append(reranker[0])
    options = {"tensor_parallel_size": 2, "max_num_batched_tokens": 64}
    configs = [config_of(folder, **options) for folder in models]
    ranks, executors = start_ranks(configs)
    try:
        mean, last, classes, scores, answers = map(Engine, configs, executors)
        check(states, "mean", pool(mean, PROMPTS, ASKED))
        check(states, "lasttoken", pool(last, PROMPTS, ASKED))
        shared = [[*PROMPTS[4][:80], 7]]
        (update,) = updates = pool(last, shared, ASKED[:1])
        assert update.num_cached_tokens == 80
        check(states, "lasttoken", updates, shared, ASKED[:1])
        check_classes(classifiers[3][1], classes, "classify", lambda logits: logits.softmax(-1))
        check_classes(classifiers[1][1], scores, "score", lambda logits: logits.sigmoid())
        check_classes(reranker[1], answers, "score", lambda logits: logits.softmax(-1)[:, 1:])
    finally:
        ranks.close()


def check_classes(model, engine, task, activation):
    """Class values of the prompts equal transformers', each of its last token."""
    updates = pool(engine, PROMPTS, [PoolingParams(task=task)] * len(PROMPTS))
    for prompt, update in zip(PROMPTS, updates, strict=True):
        with torch.inference_mode():
            want = activation(model(torch.tensor([prompt])).logits)
        torch.testing.assert_close(values(update), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"dimensions": 0}, "dimensions is 0: it must be an integer from 1"),
        ({"task": "rerank"}, "task is 'rerank': it must be one of 'embed'"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0: it must be at least 1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens is -2: it must be an integer"),
        ({"normalize": True, "use_activation": False}, "which are one field"),
        ({"use_activation": "yes"}, "use_activation is 'yes': it must be True or False"),
    ],
    ids=str,
)
def test_params_out_of_range_are_named(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        PoolingParams(**given)


def test_params_know_vllm_s_names():
    assert PoolingParams(normalize=False).use_activation is False
    assert PoolingParams(dimensions=torch.tensor(4)).dimensions == 4
    with pytest.raises(TypeError, match="did you mean 'use_activation'"):
        PoolingParams(softmax=True)
    with pytest.raises(NotImplementedError, match="step_tag_id=3 is not built yet"):
        PoolingParams(step_tag_id=3)
