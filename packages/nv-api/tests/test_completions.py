"""n completions of a prompt, and completions that end early."""

import warnings

import pytest
import torch
from nv_api import LLM, SamplingParams
from nv_api.completion import Completion


@pytest.fixture(scope="module")
def start(checkpoint):
    torch.set_num_threads(1)
    defaults = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 64}
    return lambda **options: LLM(checkpoint, **defaults | options)


def drawn(**more):
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": 5} | more)


def ids_of(output):
    return [completion.token_ids for completion in output.outputs]


@pytest.mark.parametrize("caching", [True, False])
def test_n_completions_compute_their_prompt_once_and_hold_it_once(start, caching):
    prompt = [*range(70)]
    with start(enable_prefix_caching=caching) as llm:
        request_id, most_held = llm.add_request(prompt, drawn(n=5)), 0
        while not llm.is_finished():
            llm.step()
            metrics = llm.get_metrics()
            most_held = max(most_held, metrics["num_blocks"] - metrics["num_free_blocks"])
        assert request_id == 0
    assert metrics["num_prefill_tokens"] == 70 + 4  # and the last token, for each first draw
    assert most_held == 4 + 5 * 2  # 70 + 24 tokens are six blocks, of which four are one prompt's
    assert metrics["cache_hit_tokens"] == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 16, 17, 40])
def test_a_completion_is_the_same_however_many_siblings_it_has(start, depth, length):
    """The draws follow from seed and index, as if each had been a request of its own."""
    prompt = [*range(length)]
    with start(max_in_flight=depth, enable_prefix_caching=False) as llm:
        alone = [llm.generate(prompt, drawn(n=n), use_tqdm=False)[0] for n in (1, 2, 4)]
        squeezed = start(num_kvcache_blocks=6, max_num_seqs=3, max_in_flight=depth)
        with squeezed as small:
            (tight,) = small.generate(prompt, drawn(n=4), use_tqdm=False)
    four = ids_of(alone[2])
    assert len(set(map(tuple, four))) == 4
    assert ids_of(alone[0]) == four[:1]
    assert ids_of(alone[1]) == four[:2]
    assert ids_of(tight) == four


@pytest.mark.parametrize("steps", [1, 3])
def test_the_work_for_an_end_does_not_grow_with_n(scripted, engine, monkeypatch, steps):
    """Counted in looks at a completion: 226,049 where each end looked at every one."""
    looks, finished = [], Completion.finished.fget
    monkeypatch.setattr(
        Completion, "finished", property(lambda each: looks.append(each) or finished(each))
    )
    engine.answers = [[40] * 400]
    params = SamplingParams(n=300, max_tokens=steps)
    (output,) = scripted().generate("a", params, use_tqdm=False)
    assert [len(token_ids) for token_ids in ids_of(output)] == [steps] * 300
    assert len(looks) < 300 * (10 + steps)


def test_greedy_completions_equal_the_single_one(start):
    params = drawn(n=3, temperature=0)
    with start() as llm:
        (single,) = llm.generate("some prompt", drawn(temperature=0), use_tqdm=False)
        (three,) = llm.generate("some prompt", params, use_tqdm=False)
    assert ids_of(three) == ids_of(single) * 3


def test_a_stop_string_ends_one_completion_and_its_work(start):
    """With the text the tokens end: its siblings are not kept company to their end."""
    with start(max_in_flight=0) as llm:
        (free,) = llm.generate("x", drawn(n=2, max_tokens=60), use_tqdm=False)
        stop = free.outputs[0].text[:2]
        assert stop not in free.outputs[1].text
        before = llm.get_metrics()["num_generated_tokens"]
        (cut,) = llm.generate("x", drawn(n=2, max_tokens=60, stop=stop), use_tqdm=False)
        num_generated = llm.get_metrics()["num_generated_tokens"] - before
    assert cut.outputs[0].stop_reason == stop
    assert cut.outputs[1] == free.outputs[1]
    assert num_generated == len(cut.outputs[0].token_ids) + 60


def test_a_completion_that_outgrows_the_pool_is_warned_of_once(start):
    sentence = "request 1 .* after 23 tokens: .* 2 blocks of 16 tokens: raise num_kvcache_blocks"
    with start(num_kvcache_blocks=2, enable_prefix_caching=False) as llm:
        prompts = [[*range(10)]] * 3
        params = [drawn(max_tokens=3), drawn(max_tokens=None), drawn(max_tokens=90)]
        with pytest.warns(UserWarning, match=sentence) as told:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        assert len(told) == 1
        assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3
        reasons = [output.outputs[0].stop_reason for output in outputs]
        assert reasons[0] is None
        assert all("num_kvcache_blocks" in reason for reason in reasons[1:])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            llm.generate(prompts, params, use_tqdm=False)
