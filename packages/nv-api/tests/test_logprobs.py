"""Log-probabilities and bad words, from the prompt to RequestOutput, on a tiny random model."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from nv_api import LLM, Logprob, SamplingParams
from nv_api.completion import Completion
from nv_api.logprobs import candidates
from nv_api.tokenizer import Tokenizer
from nv_engine import TokenLogprobs
from transformers import Qwen3ForCausalLM

EOS = 256


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, max_model_len=64, kvcache_block_size=16, device="cpu") as made:
        yield made


@pytest.fixture(scope="module")
def truth(checkpoint):
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def log_softmax(token_ids):
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)

    return log_softmax


def check(entries, logprobs_NV, token_ids, num, decode):
    for entry, row_V, token in zip(entries, logprobs_NV, token_ids, strict=True):
        ranks = {t: 1 + int((row_V > row_V[t]).sum()) for t in entry}
        expected = {token: None} | dict.fromkeys(row_V.topk(num).indices.tolist())
        assert entry.keys() == expected.keys()
        assert next(iter(entry)) == token
        for candidate, found in entry.items():
            assert found.logprob == pytest.approx(float(row_V[candidate]), abs=2e-5)
            assert found.rank == ranks[candidate]
            assert found.decoded_token == decode([candidate])
        json.dumps({t: asdict(found) for t, found in entry.items()}, allow_nan=False)


def test_n39_logprobs_of_every_completion(llm, truth):
    params = SamplingParams(
        n=2, temperature=0.5, top_k=2, seed=1, max_tokens=12, logprobs=3, prompt_logprobs=2
    )
    prompts = ["hello, hello world", "x"]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        prompt = output.prompt_token_ids
        for completion in output.outputs:
            tokens = completion.token_ids
            rows = truth([*prompt, *tokens])[len(prompt) - 1 : -1]
            check(completion.logprobs, rows, tokens, 3, llm.tokenizer.decode)
            total = sum(float(row[token]) for row, token in zip(rows, tokens, strict=True))
            assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
        first, *others = output.prompt_logprobs
        assert first is None
        check(others, truth(prompt)[:-1], prompt[1:], 2, llm.tokenizer.decode)


def test_a_cached_prompt_has_the_same_logprobs(llm):
    prompt = list(range(60, 100))
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    first, second = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    assert first.prompt_logprobs == second.prompt_logprobs
    assert len(second.prompt_logprobs) == 40


def test_the_whole_vocabulary_and_nothing_beside_the_token(llm):
    params = [
        SamplingParams(max_tokens=2, logprobs=-1, prompt_logprobs=-1),
        SamplingParams(max_tokens=2, logprobs=0, prompt_logprobs=0),
        SamplingParams(max_tokens=2),
    ]
    whole, least, none = llm.generate(["ab"] * 3, params, use_tqdm=False)
    assert [len(entry) for entry in whole.outputs[0].logprobs] == [320, 320]
    assert math.isclose(
        sum(math.exp(e.logprob) for e in whole.prompt_logprobs[1].values()), 1, abs_tol=1e-5
    )
    assert [list(entry) for entry in least.outputs[0].logprobs] == [
        [token] for token in least["token_ids"]
    ]
    assert list(least.prompt_logprobs[1]) == least.prompt_token_ids[1:]
    assert none.outputs[0].logprobs is none.outputs[0].cumulative_logprob is None
    assert none.prompt_logprobs is None


def test_without_text_a_token_has_none(llm, checkpoint):
    params = SamplingParams(max_tokens=2, logprobs=1, detokenize=False)
    (output,) = llm.generate("ab", params, use_tqdm=False)
    assert {c.decoded_token for entry in output.outputs[0].logprobs for c in entry.values()} == {
        None
    }
    with LLM(checkpoint, skip_tokenizer_init=True, device="cpu", max_model_len=32) as bare:
        (output,) = bare.generate([5], SamplingParams(max_tokens=2, logprobs=1), use_tqdm=False)
        assert {c.decoded_token for e in output.outputs[0].logprobs for c in e.values()} == {None}
        with pytest.raises(ValueError, match="use bad_words_token_ids"):
            bare.generate([5], SamplingParams(bad_words=["a"]))


def test_a_stop_string_cuts_logprobs_with_the_tokens(byte_level):
    tokenizer = Tokenizer(byte_level)
    params = SamplingParams(stop="c", logprobs=0)
    detokenizer = tokenizer.detokenizer(params, [])
    completion = Completion(0, params, detokenizer, tokenizer.token_text)
    (ids,) = tokenizer.encode(["abcd"])
    said = [TokenLogprobs([token], [-1.0 - place], 1) for place, token in enumerate(ids)]
    assert completion.extend(ids[:1], logprobs=said[:1]) is False
    assert completion.extend(ids[1:], logprobs=said[1:])
    output = completion.output()
    assert (output.text, output.token_ids) == ("ab", ids[:3])
    assert [
        entry[token].decoded_token for entry, token in zip(output.logprobs, ids[:3], strict=True)
    ] == ["a", "b", "c"]
    assert output.cumulative_logprob == -6.0


def test_equal_probabilities_have_equal_ranks():
    entry = TokenLogprobs([7, 5, 7, 9, 2], [-1.0, -0.5, -1.0, -1.0, -2.0], 2)
    assert candidates(entry, None) == {
        7: Logprob(-1.0, 2),
        5: Logprob(-0.5, 1),
        9: Logprob(-1.0, 2),
        2: Logprob(-2.0, 4),
    }


def test_the_spellings_of_bad_words_are_never_drawn(llm):
    free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = ["hello", "ab", "world"]
    before = [output["token_ids"] for output in llm.generate(prompts, free, use_tqdm=False)]
    pairs = {ids[at : at + 2] for ids in map(tuple, before) for at in range(29)}
    words = {llm.tokenizer.decode(pair): pair for pair in sorted(pairs)}
    words = {word: pair for word, pair in words.items() if llm.tokenizer.encode(word) == list(pair)}
    assert words  # the model says some of them, in the tokenizer's own spelling
    bound = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, bad_words=[*words])
    mixed = llm.generate(prompts * 2, [bound] * 3 + [free] * 3, use_tqdm=False)
    for output in mixed[:3]:
        ids = tuple(output["token_ids"])
        assert not {ids[at : at + 2] for at in range(29)} & set(words.values())
    assert [output["token_ids"] for output in mixed[3:]] == before


def test_a_word_is_spelled_with_and_without_a_space(byte_level, sentence_piece):
    tokenizer = Tokenizer(byte_level)
    encode = lambda text: tuple(byte_level.encode(text, add_special_tokens=False))  # noqa: E731
    assert tokenizer.word_ids("w") == (encode("w"), encode(" w"))
    assert [len(ids) for ids in tokenizer.word_ids("w")] == [1, 1]  # "Ġw" is a token
    assert tokenizer.word_ids(" hello") == (encode("hello"), encode(" hello"))
    assert tokenizer.word_ids("\n") == (encode("\n"),)


def test_controls_reach_the_engine(llm):
    allowed = llm.tokenizer.encode("abc")
    params = SamplingParams(max_tokens=10, ignore_eos=True, n=3, allowed_token_ids=allowed)
    (output,) = llm.generate("x", params, use_tqdm=False)
    assert all(set(completion.text) <= set("abc") for completion in output.outputs)
    (token,) = llm.tokenizer.encode("q")
    params = SamplingParams(max_tokens=5, logit_bias={token: 100.0}, repetition_penalty=1e9)
    (output,) = llm.generate("x", params, use_tqdm=False)
    assert output["text"].count("q") == 1  # its positive logit is divided away after the first
    with pytest.raises(ValueError, match="logit_bias has token id 320"):  # N13
        llm.generate("x", SamplingParams(logit_bias={320: 1.0}))
