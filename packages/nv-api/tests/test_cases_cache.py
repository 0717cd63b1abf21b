"""Conformance cases of the KV cache: memory, preemption and prefix hits change no token."""

import random

import pytest
import torch
from nv_api import LLM, SamplingParams
from tiny_checkpoint import make
from transformers import AutoModelForCausalLM

BLOCK = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return make(tmp_path_factory.mktemp("cache"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def start(checkpoint):
    """Make an LLM of 16-token blocks; options as for LLM."""
    defaults = {"device": "cpu", "kvcache_block_size": BLOCK, "num_kvcache_blocks": 64}
    return lambda **options: LLM(str(checkpoint), **defaults | options)


@pytest.fixture(scope="module")
def truth(checkpoint):
    """transformers' greedy continuation, EOS ignored."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()

    @torch.inference_mode()
    def continue_(prompt, num_tokens):
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    return continue_


def greedy(num_tokens):
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def prompt_of(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def complete(llm, prompts, num_tokens):
    outputs = llm.generate(prompts, greedy(num_tokens), use_tqdm=False)
    return [output["token_ids"] for output in outputs]


def num_held(llm):
    """Blocks that some sequence holds."""
    metrics = llm.get_metrics()
    return metrics["num_blocks"] - metrics["num_free_blocks"]


def finish(llm):
    """Step to the end: token ids by request."""
    results = {}
    for _ in range(1000):
        results.update(llm.step()[0])
        if llm.is_finished():
            return results
    raise AssertionError("no end in 1,000 steps")


def test_a_prompt_larger_than_the_cache_is_refused_and_a_small_one_served(start, truth):
    """N17."""
    message = "40 tokens, which takes 3 blocks of 16, and the KV cache has 2"
    with start(num_kvcache_blocks=2) as llm:
        with pytest.raises(ValueError, match=message):
            llm.generate([prompt_of(40)], greedy(4), use_tqdm=False)
        small = llm.add_request(prompt_of(6), greedy(4))
        with pytest.raises(ValueError, match=message):
            llm.add_request(prompt_of(40), greedy(4))
        assert finish(llm) == {small: truth(prompt_of(6), 4)}
        assert num_held(llm) == 0


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_pool_for_two_of_four_gives_the_same_tokens(start, truth, depth):
    """N19."""
    prompts = [prompt_of(14, seed) for seed in range(4)]
    expected = [truth(prompt, 3 * BLOCK) for prompt in prompts]
    for num_blocks, is_scarce in ((8, True), (64, False)):
        with start(num_kvcache_blocks=num_blocks, max_in_flight=depth) as llm:
            assert complete(llm, prompts, 3 * BLOCK) == expected
            assert (llm.get_metrics()["num_preemptions"] > 0) == is_scarce
            assert num_held(llm) == 0


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_prompt_of_whole_blocks_twice_leaves_tokens_to_compute(start, truth, size, num_blocks):
    """N20: all but the last 16 tokens are found."""
    prompt = prompt_of(num_blocks * size)
    expected = truth(prompt, 6)
    with start(kvcache_block_size=size) as llm:
        outputs = [llm.generate(prompt, greedy(6), use_tqdm=False)[0] for _ in range(2)]
    assert [output["token_ids"] for output in outputs] == [expected] * 2
    assert [output.num_cached_tokens for output in outputs] == [0, len(prompt) - 16]


@pytest.mark.parametrize("budget", [20, 16384])
def test_equal_prompts_in_one_cold_call(start, truth, budget):
    """N21."""
    prompt = prompt_of(3 * BLOCK)
    with start(max_num_batched_tokens=budget) as llm:
        assert complete(llm, [prompt] * 8, 8) == [truth(prompt, 8)] * 8


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("size", [16, 64])
def test_a_conversation_goes_on_where_a_block_ends(start, truth, size, depth):
    """N21: a completion's last token was drawn and never computed, so its key is not found."""
    prompt = prompt_of(size - 5)
    with start(kvcache_block_size=size, max_in_flight=depth) as llm:
        for turn in range(3):
            (output,) = llm.generate(prompt, greedy(size - len(prompt) % size), use_tqdm=False)
            assert output["token_ids"] == truth(prompt, len(output["token_ids"]))
            assert output.num_cached_tokens == max(0, turn * size - 16)
            prompt = [*prompt, *output["token_ids"], 7]


def test_the_chain_counts_not_the_content(start, truth):
    """N23."""
    a, b, c = (prompt_of(BLOCK, seed) for seed in range(3))
    with start() as llm:
        complete(llm, [a + b + c], 1)
        for prompt, num_cached in ((b + c, 0), (a + c + b, BLOCK), ([*a, *b, *c, 5], 3 * BLOCK)):
            (output,) = llm.generate(prompt, greedy(6), use_tqdm=False)
            assert output.num_cached_tokens == num_cached
            assert output["token_ids"] == truth(prompt, 6)


def test_caching_changes_no_output(start, truth):
    """N25."""
    prompt, outputs = prompt_of(3 * BLOCK), []
    for caching in (True, False):
        with start(enable_prefix_caching=caching) as llm:
            for _ in range(4):
                outputs += llm.generate(prompt, greedy(10), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [truth(prompt, 10)] * 8
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 32, 32, 0, 0, 0, 0]


def test_a_reused_block_is_not_found_by_what_it_held_before(start, truth):
    """N26, on a model; the 10^5 cycles are nv-cache's test."""
    with start(num_kvcache_blocks=3) as llm:
        for seed in range(0, 30, 2):
            old, other = prompt_of(2 * BLOCK, seed), prompt_of(3 * BLOCK, seed + 1)
            complete(llm, [old], 1)
            complete(llm, [other], 1)
            (output,) = llm.generate(old, greedy(3), use_tqdm=False)
            assert output.num_cached_tokens == 0
            assert output["token_ids"] == truth(old, 3)


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1])
def test_a_sequence_holds_as_many_blocks_as_its_length_needs(start, truth, length):
    """N27: after each forward, the blocks are those of the tokens computed so far."""
    prompt = prompt_of(length)
    with start(max_in_flight=0) as llm:
        request = llm.add_request(prompt, greedy(BLOCK + 2))
        for num_computed in range(length, length + BLOCK + 1):
            assert llm.step()[0] == []
            assert num_held(llm) == -(-num_computed // BLOCK)
        assert finish(llm) == {request: truth(prompt, BLOCK + 2)}
        assert num_held(llm) == 0


def test_changed_weights_and_a_reset_equal_a_cold_engine(start, truth):
    """N28: every weight negated but the embedding, so that no cached key or value is right."""

    def change(llm):
        model = llm._session._engine.executor._runner._model
        projections = [each for name, each in model.named_modules() if name.endswith("_proj")]
        assert projections
        for projection in projections:
            projection.weight.values.neg_()

    prompt = prompt_of(3 * BLOCK)
    with start() as warm, start() as cold:
        assert complete(warm, [prompt], 8) == [truth(prompt, 8)]
        change(warm)
        change(cold)
        assert warm.reset_prefix_cache()
        (output,) = warm.generate(prompt, greedy(8), use_tqdm=False)
        assert output.num_cached_tokens == 0
        assert [output["token_ids"]] == complete(cold, [prompt], 8)
        assert output["token_ids"] != truth(prompt, 8)


def test_prompts_share_cached_blocks_only_under_an_equal_salt(start):
    prompt, num_cached = prompt_of(70), []
    with start() as llm:
        for salt in (None, "a", "b", "a", None, None):
            asked = {"prompt_token_ids": prompt, "cache_salt": salt}
            (output,) = llm.generate([asked], greedy(2), use_tqdm=False)
            num_cached.append(output.num_cached_tokens)
        texts = [{"prompt": "w" * 40, "cache_salt": salt} for salt in ("a", "a", "b")]
        for text in texts:
            (output,) = llm.generate([text], greedy(2), use_tqdm=False)
            num_cached.append(output.num_cached_tokens)
        with pytest.raises(ValueError, match=r"prompt 1: cache_salt is '': .* 1 to 256"):
            llm.generate([prompt, {"prompt": "x", "cache_salt": ""}], greedy(2), use_tqdm=False)
    assert num_cached == [0, 0, 0, 64, 64, 64, 0, 32, 0]
