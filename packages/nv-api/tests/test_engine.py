"""LLM over the real engine: what the scripted one cannot show, blocks and tokens."""

import nv_api
import pytest
import torch
from nv_api import LLM, SamplingParams
from transformers import Qwen3ForCausalLM


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, max_model_len=64, kvcache_block_size=16, num_kvcache_blocks=64) as llm:
        yield llm


def num_held(llm):
    """Blocks that some sequence holds."""
    metrics = llm.get_metrics()
    return metrics["num_blocks"] - metrics["num_free_blocks"]


def test_greedy_ids_are_transformers(llm, checkpoint):
    prompt = list(range(20, 40))
    model = Qwen3ForCausalLM.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, temperature=None, top_k=None
        )
    params = SamplingParams(temperature=0.0, max_tokens=16)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert output["token_ids"] == ids[0, len(prompt) :].tolist()


def test_max_model_len_bounds_prompt_and_completion(llm):  # N15, N16
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    longest, short = llm.generate([[1] * 63, [1] * 10], params, use_tqdm=False)
    assert [len(longest["token_ids"]), len(short["token_ids"])] == [1, 54]
    assert longest.outputs[0].finish_reason == short.outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match=r"prompt 1.*64"):
        llm.generate([[1], [1] * 64])


@pytest.mark.parametrize("bad", [[], [5, 320], [5, -1]])
def test_a_refused_prompt_leaves_no_block_held(llm, bad):  # N06, N07, N13
    with pytest.raises(ValueError, match="prompt 1"):
        llm.generate(["ok", bad])
    assert num_held(llm) == 0
    assert len(llm.generate(["x"], use_tqdm=False)) == 1


def test_an_interrupted_generate_leaves_no_block_held(llm, monkeypatch):  # N08
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    expected = llm.generate(["c", "d"], params, use_tqdm=False)
    submit, calls = type(llm._session._engine.executor).submit, []

    def interrupted(self, batch):
        calls.append(batch)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return submit(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(type(llm._session._engine.executor), "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], params, use_tqdm=False)
    assert num_held(llm) == 0
    assert llm.generate(["c", "d"], params, use_tqdm=False) == expected


def test_a_stop_string_leaves_no_block_held(llm):
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    (whole,) = llm.generate("abc", params, use_tqdm=False)
    text = llm.tokenizer.decode(whole["token_ids"], skip_special_tokens=True)
    stop = next(letter for letter in text[2:] if letter.isascii())
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop=stop)
    (cut,) = llm.generate("abc", params, use_tqdm=False)
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert cut["text"] == text.split(stop)[0]
    assert num_held(llm) == 0
    assert llm.is_finished()


def test_cached_tokens_are_reported_until_the_cache_is_reset(llm):
    prompt = list(range(100, 140))
    llm.reset_prefix_cache()
    num_cached = []
    for reset in False, False, True:
        if reset:
            assert llm.reset_prefix_cache()
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        num_cached.append(output.num_cached_tokens)
    assert num_cached[0] == num_cached[2] == 0
    assert num_cached[1] >= 32


def test_the_times_of_a_request_are_in_order(llm):
    aborted = llm.add_request("x", SamplingParams(max_tokens=4))
    request = llm._session._processor._requests[aborted]
    llm.abort_request(aborted)
    assert request.output().metrics.first_scheduled_time is None
    (output,) = llm.generate("x", SamplingParams(n=2, max_tokens=4), use_tqdm=False)
    times = output.metrics
    in_order = (times.arrival_time, times.first_scheduled_time, times.first_token_time)
    assert sorted(in_order) == [*in_order]
    assert times.first_token_time <= times.finished_time


def test_the_types_of_the_results(llm):
    (output,) = llm.generate("x", SamplingParams(n=2, max_tokens=2), use_tqdm=False)
    assert isinstance(output, nv_api.RequestOutput)
    assert [type(c) for c in output.outputs] == [nv_api.CompletionOutput] * 2
