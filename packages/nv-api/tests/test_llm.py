import json
import shutil

import nv_api.start
import pytest
from nv_engine import SamplingParams

EOS = 256


def ids_of(llm, text):
    return llm.tokenizer.encode(text)


def test_outputs_serve_both_spellings(scripted, engine):
    with scripted() as llm:
        (output,) = llm.generate("hello", SamplingParams(max_tokens=50), use_tqdm=False)
        ids = [*ids_of(llm, "hello"), EOS]
    assert dict(output) == {"text": "hello", "token_ids": ids}
    assert isinstance(output, dict)
    assert (output["text"], output.outputs[0].text) == ("hello", "hello")
    assert output.outputs[0].token_ids == output["token_ids"] == ids
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    assert (output.prompt, output.prompt_token_ids) == ("hello", ids[:-1])
    assert output.finished
    assert output.prompt_logprobs is None
    assert output.num_cached_tokens == 0
    times = output.metrics
    assert times.arrival_time <= times.first_token_time <= times.finished_time
    assert engine.closed


def test_order_is_input_order_whatever_ends_first(scripted):
    llm = scripted()
    prompts = ["a long prompt goes on and on", "b", "a middle one", "b"]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=None), use_tqdm=False)
    assert [output["text"] for output in outputs] == prompts
    assert [output.prompt for output in outputs] == prompts


@pytest.mark.parametrize("burst", [1, 3])
def test_prompts_of_every_form(scripted, engine, burst):
    engine.burst = burst
    llm = scripted()
    ids = ids_of(llm, "hi")
    forms = [
        "hi",
        ids,
        {"prompt": "hi"},
        {"prompt_token_ids": ids},
        {"prompt": "given", "prompt_token_ids": ids},
    ]
    for form in forms:
        assert [o["text"] for o in llm.generate(form, use_tqdm=False)] == ["hi"]
    outputs = llm.generate(forms, use_tqdm=False)
    assert [o["text"] for o in outputs] == ["hi"] * 5
    assert [o.prompt for o in outputs] == ["hi", None, "hi", None, "given"]
    assert llm.generate([], use_tqdm=False) == []


def test_params_for_all_for_each_and_for_none(scripted):
    llm = scripted()
    each = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)]
    outputs = llm.generate(["xyz", "xyz"], each, use_tqdm=False)
    assert [o["text"] for o in outputs] == ["x", "xyz"]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "length"]
    (default,) = llm.generate("x" * 40, use_tqdm=False)
    assert len(default["token_ids"]) == SamplingParams().max_tokens


def test_none_is_what_the_checkpoint_recommends(scripted, folder, monkeypatch, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    monkeypatch.setattr(nv_api.start, "resolve", lambda model, revision: copy)
    recommended = {"temperature": 0.5, "top_k": 7, "max_new_tokens": 3, "do_sample": True}
    (copy / "generation_config.json").write_text(json.dumps(recommended))
    llm = scripted()
    assert llm.get_default_sampling_params() == SamplingParams(
        temperature=0.5, top_k=7, max_tokens=3
    )
    (output,) = llm.generate("xyzxyz", use_tqdm=False)
    assert (output["text"], output.outputs[0].finish_reason) == ("xyz", "length")
    (output,) = llm.generate("xyzxyz", SamplingParams(max_tokens=5), use_tqdm=False)
    assert output["text"] == "xyzxy"


@pytest.mark.parametrize(
    ("recommended", "message"),
    [
        ({"temperature": -1}, "temperature is -1: it must be a number in"),
        ({"top_k": 1.5}, "top_k is 1.5: it must be an integer"),
        (
            {"max_new_tokens": 0},
            r"config\.json: max_new_tokens is 0: it must be an integer from 1 to",
        ),
        ({"top_p": "most"}, "top_p is 'most': it must be a number"),
    ],
)
def test_a_bad_recommendation_names_its_file(
    scripted, folder, monkeypatch, tmp_path, recommended, message
):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    monkeypatch.setattr(nv_api.start, "resolve", lambda model, revision: copy)
    (copy / "generation_config.json").write_text(json.dumps(recommended))
    with pytest.raises(ValueError, match=message) as error:
        scripted()
    assert str(error.value).startswith(f"{copy / 'generation_config.json'}: ")


def test_a_length_mismatch_queues_nothing(scripted, engine):  # N09
    llm = scripted()
    with pytest.raises(ValueError, match="3 prompts and 2 sampling_params"):
        llm.generate(["a", "b", "c"], [SamplingParams()] * 2)
    with pytest.raises(TypeError, match="must be a SamplingParams"):
        llm.generate(["a"], [{"temperature": 1}])
    assert engine.num_added == 0


@pytest.mark.parametrize("bad", ["", [], {"prompt": ""}, [5, 100_000]])
def test_a_bad_prompt_raises_before_any_work(scripted, engine, bad):  # N06, N07, N13
    llm = scripted()
    with pytest.raises(ValueError, match="prompt 1"):
        llm.generate(["ok", bad])
    assert (engine.num_added, engine.num_steps) == (0, 0)
    (output,) = llm.generate(["x"], use_tqdm=False)
    assert output["text"] == "x"
    assert llm.is_finished()


def test_an_interrupt_leaves_no_trace(scripted, engine):  # N08
    llm = scripted()
    engine.interrupt_at_step = 2
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], use_tqdm=False)
    assert engine.running == []
    assert llm.is_finished()
    outputs = llm.generate(["three", "four"], use_tqdm=False)
    assert [o["text"] for o in outputs] == ["three", "four"]


def test_requests_added_before_a_generate_keep_their_results(scripted):  # N11
    llm = scripted()
    params = SamplingParams(max_tokens=100)
    early = llm.add_request("ab", params)
    late = llm.add_request("a very long one that outlives the other", params)
    (output,) = llm.generate(["a middling one"], params, use_tqdm=False)
    assert output["text"] == "a middling one"
    assert not llm.is_finished()
    results = dict(loop(llm))
    assert list(results) == [early, late]
    assert llm.tokenizer.decode(results[early], skip_special_tokens=True) == "ab"


def loop(llm):
    results = []
    while not llm.is_finished():
        results += llm.step()[0]
    return results


def test_an_interrupted_generate_spares_earlier_requests(scripted, engine):
    llm = scripted()
    request_id = llm.add_request("abc", SamplingParams())
    engine.interrupt_at_step = 2
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one"], use_tqdm=False)
    assert [pair[0] for pair in loop(llm)] == [request_id]


def test_step_counts_prefill_up_and_decode_down(scripted):
    llm = scripted()
    llm.add_request([1, 2, 3], SamplingParams())
    llm.add_request([4, 5], SamplingParams())
    steps = []
    while not llm.is_finished():
        steps.append(llm.step())
    assert [num for _, num in steps] == [5, -2, -2, -1]
    assert [outputs for outputs, _ in steps] == [[], [], [(1, [4, 5, EOS])], [(0, [1, 2, 3, EOS])]]
    assert llm.step() == ([], 0)


def test_every_completion_of_n_is_an_output_and_a_pair(scripted):
    llm = scripted()
    params = SamplingParams(n=3)
    (output,) = llm.generate("abc", params, use_tqdm=False)
    assert [(c.index, c.text) for c in output.outputs] == [(0, "abc"), (1, "bc"), (2, "c")]
    request_id = llm.add_request("abc", params)
    pairs = loop(llm)
    assert {pair[0] for pair in pairs} == {request_id}
    assert sorted(len(ids) for _, ids in pairs) == [2, 3, 4]


def test_abort_drops_a_request_and_its_kept_result(scripted):
    llm = scripted()
    first, second = (llm.add_request(p, SamplingParams()) for p in ("a", "b"))
    llm.generate("ccc", use_tqdm=False)  # both have ended meanwhile
    llm.abort_request(first)
    llm.abort_request(12345)
    assert [pair[0] for pair in loop(llm)] == [second]
    third = llm.add_request("ddd", SamplingParams())
    llm.step()
    llm.abort_request(third)
    assert llm.is_finished()


@pytest.mark.parametrize("burst", [1, 2, 5])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_cut_text_and_tokens(scripted, engine, burst, include):  # N35
    engine.burst = burst
    llm = scripted()
    params = SamplingParams(stop=["ST"], include_stop_str_in_output=include, max_tokens=50)
    (output,) = llm.generate("go STOP now", params, use_tqdm=False)
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "ST")
    assert completion.text == ("go ST" if include else "go ")
    assert llm.tokenizer.decode(completion.token_ids) == "go ST"
    assert engine.running == []


def test_a_stopped_completion_waits_for_its_siblings(scripted, engine):
    llm = scripted()
    (output,) = llm.generate("abcdef", SamplingParams(n=2, stop="f"), use_tqdm=False)
    assert [c.text for c in output.outputs] == ["abcde", "bcde"]
    engine.answers = [[]] * engine.num_added + [[97 - 33, 98 - 33, 99 - 33, 100 - 33, EOS]]
    (output,) = llm.generate("x", SamplingParams(n=2, stop=["ab"]), use_tqdm=False)
    assert [(c.text, c.finish_reason) for c in output.outputs] == [("", "stop"), ("bcd", "stop")]
    assert engine.running == []


def test_stop_strings_wait_for_min_tokens(scripted):
    llm = scripted()
    params = SamplingParams(stop=["a"], min_tokens=2, max_tokens=10)
    (output,) = llm.generate("aabaa", params, use_tqdm=False)
    assert output["text"] == "aab"


def test_the_text_of_a_stop_token_is_kept_only_on_request(scripted):
    llm = scripted()
    params = SamplingParams(skip_special_tokens=False)
    assert llm.generate("hi", params, use_tqdm=False)[0]["text"] == "hi"
    params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True)
    assert llm.generate("hi", params, use_tqdm=False)[0]["text"] == "hi<|endoftext|>"


def test_without_detokenize_there_is_no_text(scripted):
    llm = scripted()
    (output,) = llm.generate("hi", SamplingParams(detokenize=False), use_tqdm=False)
    assert output["text"] == ""
    assert output["token_ids"] == [*ids_of(llm, "hi"), EOS]


def test_without_a_tokenizer_ids_go_in_and_out(scripted):
    llm = scripted(skip_tokenizer_init=True)
    assert llm.tokenizer is None
    (output,) = llm.generate([1, 2], use_tqdm=False)
    assert dict(output) == {"text": "", "token_ids": [1, 2, EOS]}
    with pytest.raises(ValueError, match="pass token ids"):
        llm.generate("text")
    with pytest.raises(ValueError, match="use stop_token_ids"):
        llm.generate([1], SamplingParams(stop="x"))
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.get_tokenizer()


def test_a_closed_llm_refuses_work(scripted):
    llm = scripted()
    llm.close()
    llm.close()
    for call in (lambda: llm.generate(["x", "y"]), lambda: llm.generate([])):
        with pytest.raises(ValueError, match="this LLM is closed"):
            call()


def test_overrides_change_the_config_that_is_read(checkpoint):
    options = {"device": "cpu", "load_format": "dummy", "num_kvcache_blocks": 4}
    overrides = {"num_key_value_heads": 1, "max_position_embeddings": 64}
    with nv_api.LLM(checkpoint, hf_overrides=overrides, max_model_len=None, **options) as llm:
        prompt = llm.tokenizer.encode("hello")
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 64 - len(prompt)
    with pytest.raises(ValueError, match="with hf_overrides: num_attention_heads is 'x'"):
        nv_api.LLM(checkpoint, hf_overrides={"num_attention_heads": "x"}, **options)
