"""Adapters through the public API: mixed in one batch they equal the merged model, each alone."""

import asyncio
import gc
import importlib.util
import json
import pickle
import random
import re
import threading
import warnings
import weakref
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
import transformers
from nv_api import LLM, AsyncLLM, LoRARequest, PoolingParams, SamplingParams
from nv_models.adapters import AdapterPool
from safetensors.torch import load_file, save_file

BESIDE = Path(__file__).parents[2] / "nv-models/tests"
NUM_TOKENS = 6
CLOSE = 1e-5
Q1 = "model.layers.1.self_attn.q_proj"
KINDS = (
    {"r": 1},
    {"r": 4},
    {"r": 8, "dtype": torch.bfloat16},
    {"r": 16, "use_rslora": True},
    {"r": 64},
    {"r": 8, "ranks": {Q1: 3}, "alpha_pattern": {Q1: 5}},
    {"r": 8, "layers": (1, 3), "modules": ("self_attn.v_proj", "mlp.down_proj")},
    {"r": 8, "modules": ("self_attn.q_proj", "model.embed_tokens", "lm_head")},
)
"""Unequal ranks, rslora, patterns, some layers, embeddings and head."""
OPTIONS = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 24,
    "kvcache_block_size": 16, "num_kvcache_blocks": 200,
    "enable_lora": True, "max_loras": 8, "max_lora_rank": 64,
}  # fmt: skip


def beside(name):
    spec = importlib.util.spec_from_file_location(name, BESIDE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WRITER = beside("adapter_writer")


class Family:
    """A base model, its adapters, and the merged models."""

    def __init__(self, folder, name):
        self.base = beside("tiny_models").write_tiny_model(folder / "base", name)
        self.requests = []
        for number, kind in enumerate(KINDS, 1):
            options = dict(kind)
            modules = options.pop("modules", WRITER.LAYER)
            path = folder / f"adapter {number}"
            WRITER.write_adapter(path, self.base, modules, seed=number, **options)
            self.requests.append(LoRARequest(f"adapter {number}", number, str(path)))
        self.merged = {
            request: WRITER.merged_model(self.base, request and Path(request.lora_path))
            for request in (None, *self.requests)
        }

    def mix(self):
        """24 prompts of 5 to 28 tokens, each with an adapter or without; some share a prefix."""
        requests = [[None, *self.requests][number % 9] for number in range(24)]
        prompts = [[(37 * i + 11) % 320 for i in range(18)][: 4 + number] for number in range(24)]
        return [[*p, 3 + n, *range(50, 50 + n // 3)] for n, p in enumerate(prompts)], requests

    @torch.inference_mode()
    def check(self, outputs, prompts, requests, *, index=0, is_greedy=True):
        """Tokens are those of the merged model, and log-probabilities lie close to its own."""
        for output, prompt, request in zip(outputs, prompts, requests, strict=True):
            completion = output.outputs[index]
            assert output.lora_request is request
            ids = completion.token_ids
            logits = self.merged[request](torch.tensor([[*prompt, *ids]])).logits[0]
            logits = logits[len(prompt) - 1 : -1]
            if is_greedy:
                assert logits.argmax(1).tolist() == ids
            if completion.logprobs:
                found = torch.tensor(
                    [[row[token].logprob for token in range(320)] for row in completion.logprobs]
                )
                expected = logits.log_softmax(1)
                assert (found - expected).norm() / expected.norm() < CLOSE


@pytest.fixture(scope="module", params=["Qwen3", "Llama", "Qwen2"])
def family(request, tmp_path_factory):
    return Family(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return Family(tmp_path_factory.mktemp("qwen3"), "Qwen3")


def greedy(num_tokens=NUM_TOKENS, **options):
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **options)


def test_eight_adapters_and_the_base_in_one_batch(family):
    prompts, requests = family.mix()
    with LLM(str(family.base), **OPTIONS) as llm:
        outputs = llm.generate(prompts, greedy(logprobs=-1), False, requests)
        family.check(outputs, prompts, requests)
        again = llm.generate(prompts, greedy(logprobs=-1), False, requests)  # with prefix hits
        assert any(output.num_cached_tokens for output in again)
        family.check(again, prompts, requests)
        assert llm.list_loras() == set(range(1, 9))
        asked = llm.generate(prompts[:9], greedy(prompt_logprobs=0), False, requests[:9])
        for output, prompt, request in zip(asked, prompts, requests, strict=False):
            logits = family.merged[request](torch.tensor([prompt])).logits[0]
            expected = logits.log_softmax(1)[range(len(prompt) - 1), prompt[1:]]
            found = [row[t].logprob for row, t in zip(output.prompt_logprobs[1:], prompt[1:],
                                                      strict=True)]  # fmt: skip
            assert (torch.tensor(found) - expected).norm() / expected.norm() < CLOSE


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7},
        {"num_kvcache_blocks": 7, "max_num_seqs": 9},
        {"max_loras": 2, "max_in_flight": 2},
        {"max_loras": 1, "max_cpu_loras": 3, "max_in_flight": 0},
        {"tensor_parallel_size": 2, "max_loras": 3},
    ],
    ids=["chunked", "preempted", "two slots", "one slot", "two ranks"],
)
def test_the_mix_under_other_schedules(qwen3, options):
    prompts, requests = qwen3.mix()
    num_tokens = 24 if "num_kvcache_blocks" in options else NUM_TOKENS
    with LLM(str(qwen3.base), **OPTIONS | options) as llm:
        outputs = llm.generate(prompts, greedy(num_tokens, logprobs=-1), False, requests)
        if "num_kvcache_blocks" in options:
            assert llm.get_metrics()["num_preemptions"]
        qwen3.check(outputs, prompts, requests)


def test_three_completions_of_each(qwen3):
    prompts, requests = qwen3.mix()
    params = SamplingParams(n=3, max_tokens=NUM_TOKENS, logprobs=-1, seed=7, ignore_eos=True)
    with LLM(str(qwen3.base), **OPTIONS) as llm:
        outputs = llm.generate(prompts, params, False, requests)
    for index in range(3):
        qwen3.check(outputs, prompts, requests, index=index, is_greedy=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_alone_and_mixed(qwen3, dtype):
    prompts, requests = qwen3.mix()

    def values(outputs):
        return [
            (o.token_ids, [sorted((t, p.logprob) for t, p in row.items()) for row in o.logprobs])
            for output in outputs
            for o in output.outputs
        ]

    options = OPTIONS | {"deterministic": True, "dtype": dtype}
    with LLM(str(qwen3.base), **options) as llm:
        mixed = values(llm.generate(prompts, greedy(logprobs=5), False, requests))
        for number in (0, 1, 4, 8, 17):
            llm.reset_prefix_cache()
            output = llm.generate(prompts[number], greedy(logprobs=5), False, requests[number])
            assert values(output) == mixed[number : number + 1]


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize(("dtype", "gap"), [("float32", 2e-3), ("bfloat16", 0.35)])
def test_the_mix_on_a_card(qwen3, dtype, gap, eager):
    """Each token is the merged model's in fp32, or its logit lies within `gap` of that one's."""
    prompts, requests = qwen3.mix()
    options = OPTIONS | {"device": "cuda", "dtype": dtype, "enforce_eager": eager}
    with LLM(str(qwen3.base), **options) as llm:
        for _ in range(2):  # the second time from graphs, with prefix hits
            outputs = llm.generate(prompts, greedy(20), False, requests)
            num_ties = 0
            for output, prompt, request in zip(outputs, prompts, requests, strict=True):
                ids = output.outputs[0].token_ids
                with torch.inference_mode():
                    logits = qwen3.merged[request](torch.tensor([[*prompt, *ids]])).logits[0]
                logits = logits[len(prompt) - 1 : -1]
                missing = logits.max(1).values - logits[range(len(ids)), ids]
                assert missing.max() < gap, (request, missing)
                num_ties += int((missing > 0).sum())
            assert num_ties <= (0 if dtype == "float32" else 48), num_ties  # of 480


@pytest.mark.gpu
def test_deterministic_on_a_card(qwen3):
    prompts, requests = qwen3.mix()
    options = OPTIONS | {"device": "cuda", "dtype": "bfloat16", "deterministic": True}

    def values(output):
        completion = output.outputs[0]
        rows = [{token: each.logprob for token, each in row.items()} for row in completion.logprobs]
        return completion.token_ids, rows

    with LLM(str(qwen3.base), **options) as llm:
        mixed = llm.generate(prompts, greedy(logprobs=5), False, requests)
        for number in (0, 1, 4, 8, 17):
            llm.reset_prefix_cache()
            (alone,) = llm.generate(prompts[number], greedy(logprobs=5), False, requests[number])
            assert values(alone) == values(mixed[number])


def test_a_base_request_alone_has_the_bits_that_it_has_without_adapters(qwen3):
    prompts, _ = qwen3.mix()
    found = []
    for enabled in (False, True):
        with LLM(str(qwen3.base), **OPTIONS | {"enable_lora": enabled}) as llm:
            output = llm.generate(prompts, greedy(logprobs=-1), False)
            found.append([each.outputs[0].logprobs for each in output])
    assert found[0] == found[1]


def test_200_adapters_through_four_slots(qwen3, tmp_path):
    """In random order, with aborts; a corrupt one fails its own requests alone."""
    rng, requests = random.Random(0), []
    for number in range(1, 201):
        seed, folder = number % 5, tmp_path / str(number)
        WRITER.write_adapter(folder, qwen3.base, ("self_attn.q_proj", "mlp.up_proj"), r=2 + seed,
                             seed=seed)  # fmt: skip
        requests.append(LoRARequest(f"lora {number}", number, str(folder)))
    corrupt = requests[77]
    file = Path(corrupt.lora_path) / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file)
    prompt, order = [5, 6, 7, 8], requests * 2
    rng.shuffle(order)
    with LLM(str(qwen3.base), **OPTIONS | {"max_loras": 4, "max_lora_rank": 8}) as llm:
        expected = [
            llm.generate(prompt, greedy(), False, request)[0]["token_ids"]
            for request in requests[:5]
        ]
        ids, ended = {}, {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for request in order:
                ids[llm.add_request(prompt, greedy(), lora_request=request)] = request
                if rng.random() < 0.15 and len(ids) > 3:
                    aborted = rng.choice(list(ids))
                    if aborted not in ended:
                        llm.abort_request(aborted)
                        del ids[aborted]
                ended |= dict(llm.step()[0])
            while not llm.is_finished():
                ended |= dict(llm.step()[0])
        assert re.search(r"adapter lora 78: .*holds NaN or infinity", str(caught[0].message))
        assert ids.keys() <= ended.keys()
        for request_id, request in ids.items():
            want = [] if request is corrupt else expected[(request.lora_int_id - 1) % 5]
            assert ended[request_id] == want, request
        metrics = llm.get_metrics()
        assert metrics["num_free_blocks"] == metrics["num_blocks"]


def test_a_reloaded_adapter_does_not_hit_its_old_self(qwen3, tmp_path):
    prompt = [(37 * i + 11) % 320 for i in range(60)]
    one, other = (
        WRITER.write_adapter(tmp_path / name, qwen3.base, r=8, seed=seed)
        for name, seed in (("one", 1), ("other", 2))
    )
    with LLM(str(qwen3.base), **OPTIONS) as llm:

        def run(path, number=1, **more):
            request = LoRARequest("same name", number, str(path), **more)
            (output,) = llm.generate(prompt, greedy(), False, request)
            return output["token_ids"], output.num_cached_tokens

        first, cached = run(one)
        assert not cached
        assert run(one) == (first, 48)
        assert llm.generate(prompt, greedy(), False)[0].num_cached_tokens == 0
        second, cached = run(other, number=2)  # an equal name, other bytes
        assert not cached
        assert second != first
        with pytest.raises(ValueError, match=r"lora_int_id 1 is 'same name' from .*load_inplace"):
            run(other)
        for file in other.iterdir():  # the files of `one` become those of `other`
            (one / file.name).write_bytes(file.read_bytes())
        assert run(one) == (first, 48)  # the version that is loaded
        assert run(one, load_inplace=True) == (second, 48)  # the bytes of the other adapter
        assert run(other, load_inplace=True) == (second, 48)
        assert llm.remove_lora(1)
        assert not llm.remove_lora(1)
        assert llm.list_loras() == {2}
        assert llm.add_lora(LoRARequest("a", 9, str(one)))
        assert llm.list_loras() == {2, 9}


def test_an_adapter_that_changes_under_requests_in_flight(qwen3, tmp_path):
    """Requests in flight keep the version they began with."""
    prompt, params = [5, 6, 7], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    path = WRITER.write_adapter(tmp_path / "a", qwen3.base, r=8, seed=1)
    other = WRITER.write_adapter(tmp_path / "b", qwen3.base, r=8, seed=2)
    with LLM(str(qwen3.base), **OPTIONS) as llm:
        alone = []
        for number, folder in ((1, path), (2, other)):
            request = LoRARequest("x", number, str(folder))
            alone += [each["token_ids"] for each in llm.generate(prompt, params, False, request)]
        ids = [llm.add_request(prompt, params, lora_request=LoRARequest("x", 1, str(path)))]
        for _ in range(6):
            llm.step()
        replaced = LoRARequest("x", 1, str(other), load_inplace=True)
        ids.append(llm.add_request(prompt, params, lora_request=replaced))
        ended = {}
        while not llm.is_finished():
            ended |= dict(llm.step()[0])
        assert [ended[request_id] for request_id in ids] == alone


@pytest.mark.parametrize(
    "place",
    ["nv_models.adapters.AdapterFiles.digest", "nv_models.adapters.AdapterPool.fill"],
    ids=["read", "fetched"],
)
def test_rows_gain_a_token_in_every_step_while_an_adapter_is_loaded(qwen3, monkeypatch, place):
    """Whether its files are read by the library, or its image is filled for the device."""
    held = threading.Event()
    kind, name = place.rsplit(".", 1)
    module, kind = kind.rsplit(".", 1)
    kind = getattr(importlib.import_module(module), kind)
    whole = getattr(kind, name)

    def slow(*given):
        assert held.wait(60)
        return whole(*given)

    params = greedy(40)
    with LLM(str(qwen3.base), **OPTIONS | {"max_in_flight": 0}) as llm:
        (alone,) = llm.generate([5, 6], greedy(), False, qwen3.requests[0])
        ids = {llm.add_request([7 + row], params) for row in range(4)}
        ids.add(llm.add_request([9], params, lora_request=qwen3.requests[0]))
        while llm.get_metrics()["num_running"] < 5:
            llm.step()
        monkeypatch.setattr(kind, name, slow)
        late = llm.add_request([5, 6], greedy(), lora_request=qwen3.requests[1])
        for _ in range(20):
            before = llm.get_metrics()["num_generated_tokens"]
            llm.step()
            assert llm.get_metrics()["num_generated_tokens"] == before + 5
            assert llm.get_metrics()["num_running"] == 5
        held.set()
        monkeypatch.undo()
        ended = {}
        while not llm.is_finished():
            ended |= dict(llm.step()[0])
        assert ended.keys() == ids | {late}
        qwen3_ids = llm.generate([5, 6], greedy(), False, qwen3.requests[1])[0]["token_ids"]
        assert ended[late] == qwen3_ids != alone["token_ids"]


def test_a_fault_while_an_adapter_is_read_leaves_its_trace(qwen3, monkeypatch, caplog):
    def fill(*_):
        raise KeyError("a fault")

    monkeypatch.setattr(AdapterPool, "fill", fill)
    with LLM(str(qwen3.base), **OPTIONS) as llm:
        with pytest.warns(match="KeyError: 'a fault'"):
            (output,) = llm.generate([5, 6, 7], greedy(), False, qwen3.requests[0])
        assert output.outputs[0].finish_reason == "error"
        (record,) = [each for each in caplog.records if "cannot be read" in each.message]
        assert isinstance(record.exc_info[1], KeyError)
        assert llm.generate([5, 6, 7], greedy(), False)[0].outputs[0].finish_reason == "length"


def test_a_closed_engine_keeps_no_adapter(qwen3):
    options = OPTIONS | {"lora_dtype": torch.bfloat16}
    with LLM(str(qwen3.base), **options) as llm:
        llm.generate([5], greedy(), False, qwen3.requests[0])
        tables = llm._session._engine.executor._runner._adapters
        kept, thread = weakref.ref(tables._pool), tables._thread
        del tables
    del llm
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert kept() is None


def test_without_enable_lora_the_error_names_it(qwen3):
    options = OPTIONS | {"enable_lora": False}
    with LLM(str(qwen3.base), **options) as llm:
        for call in (llm.add_lora, lambda request: llm.generate([5], None, False, request)):
            with pytest.raises(ValueError, match=r"load it with enable_lora=True"):
                call(qwen3.requests[0])


def test_wrong_requests(qwen3, tmp_path):
    with LLM(str(qwen3.base), **OPTIONS | {"max_lora_rank": 8}) as llm:
        for given, kind, message in (
            ("x", TypeError, "lora_request is 'x': it must be a LoRARequest, or a list of them"),
            (["x"] * 2, TypeError, "lora_request has 'x': each must be a LoRARequest, or None"),
            (7, TypeError, "lora_request is 7: it must be a LoRARequest, or a list of them"),
            ([None], ValueError, "lora_request has 1 entries, and the number of pr"),
            ([None, LoRARequest("a", 1, "/nowhere")], FileNotFoundError, "/nowhere is not a fol"),
            ([None, qwen3.requests[4]], ValueError, r"prompt 1: .*max_lora_rank=64"),
        ):
            with pytest.raises(kind, match=message):
                llm.generate([[5], [6]], greedy(), False, given)
        assert llm.generate([5], greedy(), False)[0].lora_request is None
        for given in ("x", [1], None, 0):
            with pytest.raises(ValueError, match=r"lora_id is .*: it must be an integer from 1"):
                llm.remove_lora(given)
        with pytest.raises(TypeError, match=r"lora_request is None: it must be a LoRARequest$"):
            llm.add_lora(None)
        path = qwen3.requests[0].lora_path
        assert llm.add_lora(LoRARequest("a", 5, path))
        assert llm.add_lora(LoRARequest("a", 5, f"{path}/"))
        with pytest.raises(ValueError, match="give 'b' from /other another id"):
            llm.add_lora(LoRARequest("b", 5, "/other"))
    for fields, message in (
        (("", 1, "p"), "lora_name is ''"),
        (("n", 0, "p"), "lora_int_id is 0: it must be an integer from 1"),
        (("n", 1, ""), "lora_path is ''"),
        (("n", 1, "p", None, 2), "load_inplace is 2"),
        (("n", 1, "p", 5), "base_model_name is 5: it must be a text"),
        (("\ud800", 1, "p"), "lora_name is .*in valid Unicode"),
        (("n", 1, "p\0"), "lora_path is .*null characters"),
        (("n", True, "p"), "lora_int_id is True"),
        (("n", 1, b"p"), "lora_path is b'p'"),
        ((" ", 1, "p"), "lora_name is ' '"),
    ):
        with pytest.raises(ValueError, match=message):
            LoRARequest(*fields)
    for given, message in (
        ({"path": "p"}, "LoRARequest has no option 'path': did you mean 'lora_path'"),
        ({"lora_local_path": "p"}, "did you mean 'lora_path'"),
        ({}, "LoRARequest lacks lora_path: call LoRARequest"),
    ):
        with pytest.raises(TypeError, match=message):
            LoRARequest("n", 1, **given)
    with pytest.raises(NotImplementedError, match="save the adapter with peft"):
        LoRARequest("n", 1, "p", tensorizer_config_dict={"a": 1})
    request = LoRARequest("n", numpy.int64(1), Path("p"))
    assert pickle.loads(pickle.dumps(request)) == replace(request) == LoRARequest("n", 1, "p")
    for options, message in (
        ({"max_loras": 0}, "max_loras is 0"),
        ({"max_lora_rank": 1000}, "max_lora_rank is 1000"),
        ({"max_cpu_loras": 2}, "max_cpu_loras is 2: it must be an integer from 8"),
        ({"max_cpu_loras": 10**9}, "max_cpu_loras is 1000000000: with .* has room for [1-9]"),
        ({"lora_dtype": "int8"}, "lora_dtype is 'int8'"),
        ({"enable_lora": "yes"}, "enable_lora is 'yes'"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(str(qwen3.base), **OPTIONS | options)
    for name, value, message in (
        ("lora_extra_vocab_size", 512, "an adapter may not add tokens"),
        ("enable_lora_bias", True, "train the adapter without a bias"),
        ("long_lora_scaling_factors", (4.0,), "merge such an adapter"),
        ("lora_target_modules", ["q_proj"], "the tensors of an adapter's file decide"),
    ):
        with pytest.raises(NotImplementedError, match=f"{name}=.* is not built yet: {message}"):
            LLM(str(qwen3.base), **OPTIONS | {name: value})
    with pytest.raises(TypeError, match="'lora_modules': pass lora_request=… to each call"):
        LLM(str(qwen3.base), **OPTIONS, lora_modules=["a=b"])


def test_an_embedding_with_an_adapter(qwen3):
    """A pooling model's adapter changes its last state."""
    prompts, requests = [[5, 6, 7, 8]] * 3, [None, *qwen3.requests[:2]]
    options = {**OPTIONS, "runner": "pooling", "convert": "embed"}
    with LLM(str(qwen3.base), **options) as llm:
        outputs = llm.encode(prompts, None, False, requests, "embed")
        for output, request in zip(outputs, requests, strict=True):
            with torch.inference_mode():
                state = qwen3.merged[request].model(torch.tensor(prompts[:1])).last_hidden_state
            expected = torch.nn.functional.normalize(state[0, -1], dim=0)
            assert (output.outputs.data - expected).norm() < CLOSE


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A base with three classes, an adapter that replaces the head, and one of low rank on it."""
    folder = tmp_path_factory.mktemp("classifier")
    tiny = beside("tiny_models")
    config = transformers.Qwen3Config(**tiny.SIZES, **tiny.CASES["Qwen3"], num_labels=3)
    model = transformers.Qwen3ForSequenceClassification(config)
    tiny.randomize(model, 0)
    model.save_pretrained(folder / "base")
    requests = []
    for number, more in enumerate(
        (
            {"base_model.model.score.weight": torch.randn(3, 64)},
            {
                "base_model.model.score.lora_A.weight": torch.randn(4, 64),
                "base_model.model.score.lora_B.weight": torch.randn(3, 4),
            },
        ),
        1,
    ):
        path = WRITER.write_adapter(
            folder / str(number), folder / "base", r=4, seed=number, modules_to_save=["score"]
        )
        file = path / "adapter_model.safetensors"
        save_file(load_file(file) | more, file)
        requests.append(LoRARequest(f"classes {number}", number, str(path)))
    return folder / "base", requests


@torch.inference_mode()
def classes(base, request, prompt):
    """Logits [3] of the merged classifier."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    )
    if request is not None:
        tensors = load_file(Path(request.lora_path) / "adapter_model.safetensors")
        modules = dict(model.named_modules())
        for name, values in tensors.items():
            module = name.removeprefix("base_model.model.")
            if module == "score.weight":
                model.score.weight.copy_(values)
            elif module.endswith(".lora_A.weight"):
                delta = 2 * tensors[name.replace("lora_A", "lora_B")] @ values
                modules[module.removesuffix(".lora_A.weight")].weight.add_(delta)
    return model(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("task", ["classify", "token_classify"])
def test_a_classifier_s_own_head(classifier, task):
    base, adapters = classifier
    prompts = [[5, 6, 7, 8, *range(20, 20 + 3 * n)] for n in range(6)]
    requests = [None, *adapters] * 2
    with LLM(str(base), **OPTIONS | {"max_num_batched_tokens": 9}) as llm:
        assert task == "classify" or "token_classify" in llm._pooler.tasks
        params = PoolingParams(use_activation=False)
        outputs = llm.encode(prompts, params, False, requests, task)
        for output, prompt, request in zip(outputs, prompts, requests, strict=True):
            found = output.outputs.data if task == "classify" else output.outputs.data[-1]
            expected = classes(base, request, prompt)
            assert (found - expected).norm() / expected.norm() < CLOSE


def test_async(qwen3, tmp_path):
    """From another process; a folder that is not there is refused there."""
    prompts, requests = qwen3.mix()

    async def one(llm, number):
        async for output in llm.generate(prompts[number], greedy(), lora_request=requests[number]):
            last = output
        return last

    async def main():
        async with AsyncLLM(str(qwen3.base), **OPTIONS) as llm:
            outputs = await asyncio.gather(*(one(llm, number) for number in range(9)))
            with pytest.raises(FileNotFoundError, match="is not a folder"):
                async for _ in llm.generate(
                    [5], greedy(), lora_request=LoRARequest("a", 99, str(tmp_path / "none"))
                ):
                    pass
        return outputs

    outputs = asyncio.run(main())
    qwen3.check(outputs, prompts[:9], requests[:9])


def test_the_config_of_an_adapter_is_checked_before_any_request_starts(qwen3, tmp_path):
    folder = WRITER.write_adapter(tmp_path / "a", qwen3.base)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
    with LLM(str(qwen3.base), **OPTIONS) as llm:
        with pytest.raises(ValueError, match=r"use_dora is True.*merge_and_unload"):
            llm.generate([[5], [6]], greedy(), False, LoRARequest("a", 1, str(folder)))
        assert llm.get_metrics()["num_requests"] == 0
