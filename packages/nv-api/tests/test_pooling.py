"""embed, classify, score, reward and encode equal their definitions over transformers' models."""

import asyncio
import json
import math
import shutil
from contextlib import nullcontext
from copy import deepcopy

import numpy as np
import pytest
import torch
from nv_api import LLM, AsyncLLM, PoolingParams, SamplingParams
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import normalize
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Qwen3Config,
)

EOS = 256
MAX_LEN = 48
OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "max_num_seqs": 8, "max_model_len": MAX_LEN,
           "num_kvcache_blocks": 40}  # fmt: skip
TEXTS = ["hello world", "a", "the sea is wide and deep", "STOP hello hello", "é日本"]
QUERY = "which sea is wide? "
SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
         "max_position_embeddings": 128, "initializer_range": 0.15, "eos_token_id": EOS,
         "pad_token_id": 319, "dtype": "float32"}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(byte_level):
    """Ends each text with EOS, as the tokenizer of Qwen3-Embedding does."""
    tokenizer = deepcopy(byte_level)
    end = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, EOS)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    """A function that saves a tiny model of a class, with the tokenizer, and more files."""

    def save(kind, files=None, **fields):
        torch.manual_seed(1)
        folder = tmp_path_factory.mktemp("pooling")
        kind.from_config(Qwen3Config(**SIZES | fields)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for name, content in (files or {}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content))
        return folder

    return save


def opened(folder, **options):
    return LLM(str(folder), **OPTIONS | options)


@pytest.fixture(scope="module")
def embedder(saved):
    """A folder of sentence-transformers as Qwen3-Embedding's."""
    kinds = enumerate(("Transformer", "Pooling", "Normalize"))
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    return saved(
        AutoModel,
        {
            "modules.json": [
                {"type": kind, "path": f"{i}_{kind}" if i else ""} for i, kind in kinds
            ],
            "1_Pooling/config.json": {"pooling_mode_lasttoken": True},
            "config_sentence_transformers.json": {"prompts": prompts},
        },
    )


@pytest.fixture(scope="module")
def llm(embedder):
    with opened(embedder) as llm:
        yield llm


@pytest.fixture(scope="module")
def states(embedder):
    model = AutoModel.from_pretrained(embedder).eval()

    def states_of(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).last_hidden_state[0]

    return states_of


def close(found, want):
    torch.testing.assert_close(torch.as_tensor(found), want, atol=1e-5, rtol=1e-5)


def test_embeddings_of_texts_end_with_the_tokenizer_s_eos(llm, states, tokenizer):
    outputs = llm.embed(TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, outputs, strict=True):
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == EOS
        assert output.prompt_token_ids == ids
        close(output.outputs.embedding, normalize(states(ids)[-1], dim=-1))
        assert (output.finished, output.error, output.outputs.hidden_size) == (True, None, 64)
    assert [output.request_id for output in outputs] == sorted({o.request_id for o in outputs})


def test_prompts_by_name_or_in_a_dict(llm, tokenizer):
    (named,) = llm.embed("sea", use_tqdm=False, prompt_name="query")
    assert named.prompt_token_ids == tokenizer("Instruct: find\nQuery:sea")["input_ids"]
    (same,) = llm.embed({"prompt": "Instruct: find\nQuery:sea"}, use_tqdm=False)
    close(same.outputs.embedding, torch.tensor(named.outputs.embedding))
    (plain,) = llm.embed("sea", use_tqdm=False, prompt_name="document")
    assert plain.prompt_token_ids == tokenizer("sea")["input_ids"]


@pytest.mark.parametrize(
    ("mode", "is_refused"), [("mean", True), ("cls", True), ("lasttoken", False)]
)
def test_a_prompt_whose_tokens_do_not_count_is_refused(embedder, tmp_path, mode, is_refused):
    folder = shutil.copytree(embedder, tmp_path / "m")
    pooling = {"pooling_mode": mode, "include_prompt": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    with opened(folder) as llm:
        for name in (None, "document"):
            assert llm.embed("sea", use_tqdm=False, prompt_name=name)[0].outputs.embedding
        refused = pytest.raises(ValueError, match=r"'query' goes .*include_prompt is false")
        with refused if is_refused else nullcontext():
            llm.embed("sea", use_tqdm=False, prompt_name="query")


def test_parameters_are_one_for_all_or_one_each(llm, states, tokenizer):
    params = [
        PoolingParams(dimensions=8),
        PoolingParams(normalize=False),
        PoolingParams(truncate_prompt_tokens=3),
        PoolingParams(dimensions=3, use_activation=False, task="embed"),
        PoolingParams(truncate_prompt_tokens=-1),
    ]
    found = [each.outputs.embedding for each in llm.embed(TEXTS, params, use_tqdm=False)]
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    close(found[0], normalize(states(ids[0])[-1][:8], dim=-1))
    close(found[1], states(ids[1])[-1])
    close(found[2], normalize(states(ids[2][-3:])[-1], dim=-1))
    close(found[3], states(ids[3])[-1][:3])
    (one,) = llm.embed(TEXTS[0], PoolingParams(dimensions=8), use_tqdm=False)
    close(one.outputs.embedding, torch.tensor(found[0]))
    (long,) = llm.embed("x" * 100, PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert len(long.prompt_token_ids) == MAX_LEN


def test_encode_gives_tensors_of_every_task(llm, states, tokenizer):
    ids = tokenizer(TEXTS[0])["input_ids"]
    (whole,) = llm.encode(ids, use_tqdm=False, pooling_task="embed")
    close(whole.outputs.data, normalize(states(ids)[-1], dim=-1))
    (tokens,) = llm.encode([ids], PoolingParams(task="token_embed"), use_tqdm=False)
    close(tokens.outputs.data, normalize(states(ids), dim=-1))
    assert tokens.num_cached_tokens == 0


def test_a_score_of_two_embeddings_is_their_cosine(llm, states, tokenizer):
    vectors = [normalize(states(tokenizer(text)["input_ids"])[-1], dim=-1) for text in TEXTS]
    for first, second, pairs in (
        (TEXTS[0], TEXTS[1], [(0, 1)]),
        (TEXTS[0], TEXTS[1:], [(0, i) for i in range(1, 5)]),
        (TEXTS, TEXTS[::-1], [(i, 4 - i) for i in range(5)]),
    ):
        outputs = llm.score(first, second, use_tqdm=False)
        want = torch.stack([vectors[i] @ vectors[j] for i, j in pairs])
        close([output.outputs.score for output in outputs], want)


def test_a_prefix_is_found_and_a_prompt_may_fill_the_model(llm, states):
    ids = [(7 * n) % 250 + 3 for n in range(MAX_LEN)]
    llm.reset_prefix_cache()
    for hits in (0, 32):
        (output,) = llm.embed([ids], use_tqdm=False)
        assert output.num_cached_tokens == hits
        close(output.outputs.embedding, normalize(states(ids)[-1], dim=-1))


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda llm: llm.embed(["a", ""]), ValueError, "prompt 1 is empty"),
        (
            lambda llm: llm.embed("a", truncate_prompt_tokens=5),
            TypeError,
            r"has no option 'truncate_prompt_tokens': pass PoolingParams\(truncate_prompt_tokens=5",
        ),
        (
            lambda llm: llm.embed("a", dimensions=2),
            TypeError,
            r"has no option 'dimensions': pass PoolingParams\(dimensions=2\)",
        ),
        (lambda llm: llm.embed("x" * 60), ValueError, "61 tokens .*truncate_prompt_tokens=-1"),
        (lambda llm: llm.embed("a", PoolingParams(dimensions=65)), ValueError, "from 1 to 64"),
        (
            lambda llm: llm.embed("a", PoolingParams(truncate_prompt_tokens=49)),
            ValueError,
            "truncate_prompt_tokens is 49: it must be at most max_model_len, which is 48",
        ),
        (lambda llm: llm.embed("a", SamplingParams()), TypeError, "must be a PoolingParams"),
        (lambda llm: llm.embed("a", [PoolingParams()] * 2), ValueError, "1 prompts and 2 pooling"),
        (
            lambda llm: llm.embed("a", PoolingParams(task="classify")),
            ValueError,
            "the task 'classify' and the call 'embed'",
        ),
        (lambda llm: llm.embed("a", False), TypeError, "pooling_params is"),
        (lambda llm: llm.embed("a", None, PoolingParams()), TypeError, "use_tqdm is"),
        (lambda llm: llm.embed("a", prompt_name="q"), ValueError, "this model has 'query'"),
        (lambda llm: llm.embed([3], prompt_name="query"), ValueError, "is token ids: give texts"),
        (lambda llm: llm.embed("a", lora_request=1), TypeError, "lora_request is 1"),
        (lambda llm: llm.classify("a"), ValueError, "task is 'classify': this model has embed"),
        (lambda llm: llm.reward("a"), ValueError, "task is 'classify': this model has embed"),
        (lambda llm: llm.encode("a"), ValueError, "encode needs a task: .*embed, token_embed"),
        (lambda llm: llm.encode("a", pooling_task=np.ones(2)), ValueError, "task is array"),
        (lambda llm: llm.embed("a", prompt_name=["query"]), ValueError, "this model has 'query'"),
        (lambda llm: llm.encode("a", pooling_task="x"), ValueError, "task is 'x': it must be one"),
        (lambda llm: llm.score("a", []), ValueError, "data_2 is empty"),
        (lambda llm: llm.score("a", ["b", ""]), ValueError, "prompt 1 is empty"),
        (lambda llm: llm.score("a", "x" * 60), ValueError, "61 tokens .*truncate_prompt_tokens"),
        (lambda llm: llm.score(["a", "b"], ["c"] * 3), ValueError, "2 texts and data_2 3"),
        (
            lambda llm: llm.score("a", "b", chat_template="x"),
            ValueError,
            "embeds each alone; leave chat_template out",
        ),
        (lambda llm: llm.generate("a"), ValueError, "this engine pools .* generates no text"),
        (lambda llm: llm.add_request("a"), ValueError, "this engine pools"),
        (lambda llm: llm.generate("a" * 1000), ValueError, "this engine pools"),
        (lambda llm: llm.chat([{"role": "user", "content": "a"}]), ValueError, "engine pools"),
        (lambda llm: llm.stream_chat([{"role": "user", "content": "a"}]), ValueError, "pools"),
        (lambda llm: llm.embed([3, 320]), ValueError, "token id 320"),
    ],
)
def test_a_bad_call_is_one_sentence_before_any_work(llm, call, error, sentence):
    check_refused(llm, call, error, sentence)


def check_refused(llm, call, error, sentence):
    before = llm.get_metrics()["num_steps"]
    with pytest.raises(error, match=sentence) as raised:
        call(llm)
    assert "\n" not in str(raised.value)
    assert llm.is_finished()
    assert llm.get_metrics()["num_steps"] == before


@pytest.fixture(scope="module")
def classifier(saved):
    with opened(saved(AutoModelForSequenceClassification, num_labels=1)) as llm:
        yield llm


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda llm: llm.classify(["a", ""]), "prompt 1 is empty"),
        (lambda llm: llm.score("", "b"), "the prompt is empty"),
        (lambda llm: llm.classify("x" * 60), "61 tokens .*truncate_prompt_tokens=-1"),
        (lambda llm: llm.score("x" * 30, "x" * 30), "61 tokens .*truncate_prompt_tokens=-1"),
        (
            lambda llm: llm.classify("a", PoolingParams(dimensions=2)),
            "dimensions is 2 and task 'classify', whose results are not embeddings",
        ),
        (lambda llm: llm.score("a", "b", False, PoolingParams(dimensions=2)), "and task 'score'"),
        (lambda llm: llm.reward("a", PoolingParams(dimensions=2)), "and task 'classify'"),
        (lambda llm: llm.embed("a"), "task is 'embed': this model has score, classify, token"),
        (lambda llm: llm.score("a", "b", False, PoolingParams(task="embed")), "'embed' and the c"),
        (lambda llm: llm.score("a", [65]), "pair 0 is a text and token ids"),
        (lambda llm: llm.generate("a"), r"this engine pools \(score.* generates no text"),
    ],
)
def test_a_bad_call_of_a_classifier_is_one_sentence_before_any_work(classifier, call, sentence):
    check_refused(classifier, call, ValueError, sentence)


def test_embeddings_through_dense_layers(saved, tokenizer):
    kinds = enumerate(("Transformer", "Pooling", "Dense", "Normalize"))
    modules = [{"type": kind, "path": f"{i}_{kind}" if i else ""} for i, kind in kinds]
    dense = {"in_features": 64, "out_features": 7, "bias": True,
             "activation_function": "torch.nn.modules.activation.Tanh"}  # fmt: skip
    files = {"modules.json": modules, "1_Pooling/config.json": {"pooling_mode": "mean"}}
    folder = saved(AutoModel, files | {"2_Dense/config.json": dense})
    layer, model = torch.nn.Linear(64, 7), AutoModel.from_pretrained(folder).eval()
    named = {f"linear.{name}": value.detach() for name, value in layer.named_parameters()}
    save_file(named, folder / "2_Dense" / "model.safetensors")
    with torch.inference_mode(), opened(folder, max_num_batched_tokens=16) as llm:
        params = [PoolingParams(dimensions=3 if i % 2 else None) for i in range(len(TEXTS))]
        for text, each, output in zip(
            TEXTS, params, llm.embed(TEXTS, params, use_tqdm=False), strict=True
        ):
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            hidden = layer(model(ids).last_hidden_state[0].mean(0)).tanh()
            close(output.outputs.embedding, normalize(hidden[: each.dimensions], dim=-1))


def test_a_bar_counts_prompts(llm):
    seen = []

    class Bar:
        def __init__(self, total, desc, **_):
            seen.append((desc, total))

        def update(self, count):
            seen.append(count)

        def set_postfix(self, values):
            assert set(values) == {"Prefill", "Decode"}

        def close(self):
            seen.append("closed")

    assert llm.embed([], use_tqdm=Bar) == []
    llm.embed(TEXTS, use_tqdm=Bar)
    assert seen[0] == ("Pooling", 5)
    assert sum(seen[1:-1]) == 5
    assert seen[-1] == "closed"


def test_a_text_model_refuses_to_pool_unless_it_is_asked(saved):
    folder = saved(AutoModelForCausalLM)
    with opened(folder) as generates, pytest.raises(ValueError, match='runner="pooling"'):
        generates.embed("a")
    with opened(folder, task="embed") as pools:
        (output,) = pools.embed("a", use_tqdm=False)
        assert math.isclose(sum(x * x for x in output.outputs.embedding), 1, rel_tol=1e-5)


ACTIVATIONS = {
    ("single_label_classification", 3): lambda x: x.softmax(-1),
    ("multi_label_classification", 3): lambda x: x.sigmoid(),
    ("regression", 2): lambda x: x,
    (None, 1): lambda x: x.sigmoid(),
}


@pytest.mark.parametrize(("problem", "num_labels"), ACTIVATIONS)
def test_class_values_of_every_problem(saved, tokenizer, problem, num_labels):
    kind = AutoModelForSequenceClassification
    folder = saved(kind, num_labels=num_labels, problem_type=problem)
    model, activate = kind.from_pretrained(folder).eval(), ACTIVATIONS[problem, num_labels]
    with torch.inference_mode(), opened(folder, max_num_batched_tokens=16) as llm:
        ids = [tokenizer(text)["input_ids"] for text in TEXTS]
        logits = [model(torch.tensor([each])).logits[0] for each in ids]
        for output, want in zip(llm.classify(TEXTS, use_tqdm=False), logits, strict=True):
            close(output.outputs.probs, activate(want))
            assert output.outputs.num_classes == num_labels
        for output, want in zip(llm.reward(TEXTS, use_tqdm=False), logits, strict=True):
            close(output.outputs.data, want)
        hidden = model.model(torch.tensor([ids[2]])).last_hidden_state[0]
        (tokens,) = llm.encode(TEXTS[2], use_tqdm=False, pooling_task="token_classify")
        close(tokens.outputs.data, activate(model.score(hidden)))
        if num_labels > 1:
            with pytest.raises(ValueError, match="'score': this model has classify, token_class"):
                llm.score("a", "b")
            return
        pair = tokenizer("a", "b")["input_ids"]
        (output,) = llm.score("a", "b", use_tqdm=False)
        assert output.prompt_token_ids == pair
        close(output.outputs.score, model(torch.tensor([pair])).logits[0, 0].sigmoid())


def test_a_token_classifier_has_a_result_for_each_token(saved, tokenizer):
    kind = AutoModelForTokenClassification
    folder = saved(kind, num_labels=3)
    model = kind.from_pretrained(folder).eval()
    with torch.no_grad():
        model.score.bias.normal_()
    model.save_pretrained(folder)
    with torch.inference_mode(), opened(folder, max_num_batched_tokens=16) as llm:
        outputs = llm.encode(TEXTS, use_tqdm=False, pooling_task="token_classify")
        for text, output in zip(TEXTS, outputs, strict=True):
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            close(output.outputs.data, model(ids).logits[0].softmax(-1))
        with pytest.raises(ValueError, match="'classify': this model has token_classify"):
            llm.classify("a")


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<|im_end|>"


def test_a_reranker_scores_by_two_tokens_of_its_head(saved, tokenizer):
    folder = saved(AutoModelForCausalLM, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    no, yes = tokenizer.convert_tokens_to_ids(["n", "y"])

    def truth(ids):
        return model(torch.tensor([ids])).logits[0, -1][[no, yes]].softmax(-1)[1]

    options = {"max_model_len": 128, "hf_overrides": overrides}
    with torch.inference_mode(), opened(folder, **options) as llm:
        outputs = llm.score(QUERY * 2, TEXTS, use_tqdm=False)
        for text, output in zip(TEXTS, outputs, strict=True):
            assert output.prompt_token_ids == tokenizer(QUERY * 2 + text)["input_ids"]
            close(output.outputs.score, truth(output.prompt_token_ids))
        again = llm.score(QUERY * 2, "another text", use_tqdm=False)[0]
        assert again.num_cached_tokens >= 32
        close(again.outputs.score, truth(again.prompt_token_ids))
        templated = llm.score(QUERY, TEXTS, use_tqdm=False, chat_template=TEMPLATE)
        for text, output in zip(TEXTS, templated, strict=True):
            shown = f"<query>{QUERY}<document>{text}<|im_end|>"
            ids = tokenizer(shown, add_special_tokens=False)["input_ids"]
            assert output.prompt_token_ids == ids
            close(output.outputs.score, truth(ids))
        _check_pairs_of_ids_and_salts(llm)
        (logit,) = llm.score("a", "b", False, PoolingParams(use_activation=False))
        close(torch.tensor(logit.outputs.score).sigmoid(), truth(logit.prompt_token_ids))


def _check_pairs_of_ids_and_salts(llm):
    """No text is left out of a pair in silence, and a salt keeps the pair's blocks apart."""
    for first, second, options, sentence in (
        ([65], [66], {"chat_template": TEMPLATE}, "pair 0 is token ids and chat_template is given"),
        (["a", [65]], ["b", [66]], {}, "pairs 0 and 1 are texts and token ids"),
        ([[65], "a"], [[66], "b"], {}, "pairs 0 and 1 are texts and token ids"),
        (["a", [65]], ["b", [66]], {"chat_template": TEMPLATE}, "pairs 0 and 1"),
        ("a", [65], {}, "pair 0 is a text and token ids"),
        (salted("a", "x"), salted("b", "y"), {}, "pair 0 has the cache_salts 'x' and 'y': give"),
        (salted("a", "x"), "b", {}, "cache_salts 'x' and None"),
    ):
        with pytest.raises(ValueError, match=sentence):
            llm.score(first, second, use_tqdm=False, **options)
    first, second = salted(QUERY * 2, "x"), salted("another text", "x")
    for options in ({}, {"chat_template": TEMPLATE}):
        hits = [llm.score(first, second, False, **options)[0].num_cached_tokens for _ in range(2)]
        assert hits[0] == 0 < hits[1]
    ids = salted([7] * 40, "x", "prompt_token_ids"), salted([8], "x", "prompt_token_ids")
    hits = [llm.score(*ids, False)[0].num_cached_tokens for _ in range(2)]
    assert hits[0] == 0 < hits[1]
    assert llm.score([7] * 40, [8], False)[0].num_cached_tokens == 0


def salted(prompt, salt, key="prompt"):
    return {key: prompt, "cache_salt": salt}


def test_a_prompt_that_fails_is_an_error_of_its_own(embedder, tmp_path):
    folder = shutil.copytree(embedder, tmp_path / "damaged")
    weights = load_file(folder / "model.safetensors")
    weights["embed_tokens.weight"][99] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with opened(folder) as llm:
        with pytest.warns(UserWarning, match="1 completion ended .*NaN") as embedded:
            good, bad = llm.embed([[5, 6], [5, 99]], use_tqdm=False)
        with pytest.warns(UserWarning, match="1 completion ended .*NaN") as scored:
            fine, broken = llm.score([5, 6], [[5, 7], [5, 99]], use_tqdm=False)
    assert {each.filename for each in (*embedded, *scored)} == {__file__}
    assert -1 <= fine.outputs.score <= 1
    assert broken.error == bad.error
    with pytest.raises(RuntimeError, match="no result: the hidden states"):
        _ = broken.outputs.score
    assert len(good.outputs.embedding) == 64
    assert "hidden states of this prompt hold NaN" in bad.error
    with pytest.raises(RuntimeError, match="no result: the hidden states"):
        _ = bad.outputs.embedding


@pytest.mark.slow
def test_async_encode_gives_the_same(embedder, llm):
    async def run():
        async with AsyncLLM(str(embedder), **OPTIONS) as front:

            async def one(text, **more):
                return [each async for each in front.encode(text, **more)]

            found = await asyncio.gather(*(one(text, pooling_task="embed") for text in TEXTS))
            (tokens,) = await one(TEXTS[0], pooling_params=PoolingParams(task="token_embed"))
            for given, sentence in (
                ({"pooling_task": "score"}, "task is 'score': this model has embed"),
                ({"pooling_task": "embed", "request_id": 3, "prompt_name": "x"}, "prompt_name is"),
            ):
                with pytest.raises(ValueError, match=sentence):
                    await one("a", **given)
            chat = [{"role": "user", "content": "a"}]
            for outputs in (front.generate("a" * 1000), front.chat(chat)):
                with pytest.raises(ValueError, match="this engine pools"):
                    _ = [each async for each in outputs]
            return found, tokens

    found, tokens = asyncio.run(run())
    want = llm.embed(TEXTS, use_tqdm=False)
    for (output,), each in zip(found, want, strict=True):
        close(output.outputs.data, each.outputs.data)
    assert tokens.outputs.data.shape == (len(tokens.prompt_token_ids), 64)
