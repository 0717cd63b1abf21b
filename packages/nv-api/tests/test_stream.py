"""`LLM.stream` and `LLM.stream_chat`: the deltas of one request, as they come."""

import pytest
from nv_api import LLM, SamplingParams

USER = [{"role": "user", "content": "abc"}]
PARAMS = SamplingParams(max_tokens=30)


def test_deltas_joined_are_the_completion(scripted, engine):
    engine.burst = 2
    llm = scripted()
    (whole,) = llm.generate("héllo, 日本", PARAMS, use_tqdm=False)
    deltas = list(llm.stream("héllo, 日本", PARAMS))
    assert "".join(delta.text for delta in deltas) == whole["text"]
    assert [token for delta in deltas for token in delta.token_ids] == whole["token_ids"]
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "stop"
    assert len(deltas) > 3
    assert llm.is_finished()


def test_nothing_is_left_half_done_where_the_caller_may_use_the_device(scripted, engine):
    """A capture that goes on over several steps forbids a wait for the whole device."""
    llm = scripted()
    for number, _ in enumerate(llm.stream("abcde", PARAMS), 1):
        assert engine.num_rests >= number
    before = engine.num_rests
    llm.generate("abcde", PARAMS, use_tqdm=False)
    assert engine.num_rests == before + 1
    llm.add_request("abcde", PARAMS)
    for number in range(3):
        llm.step()
        assert engine.num_rests == before + 2 + number


def test_a_stream_of_a_chat_is_the_chat(scripted, engine):
    engine.answers = [[39, 40, 256]] * 3
    llm = scripted()
    (whole,) = llm.chat(USER, PARAMS, use_tqdm=False)
    for options in {}, {"chat_template_kwargs": {"enable_thinking": False}}:
        deltas = list(llm.stream_chat(USER, PARAMS, **options))
        assert "".join(delta.text for delta in deltas) == whole["text"] == "HI"


def test_each_completion_ends_once(scripted):
    llm = scripted()
    deltas = list(llm.stream("abc", SamplingParams(n=3, max_tokens=30)))
    texts = ["".join(delta.text for delta in deltas if delta.index == i) for i in range(3)]
    assert texts == ["abc", "bc", "c"]
    assert sorted(delta.index for delta in deltas if delta.finished()) == [0, 1, 2]


def test_a_delta_has_the_log_probabilities_of_its_own_tokens(checkpoint):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True)
    with LLM(checkpoint, device="cpu", num_kvcache_blocks=8, max_model_len=64) as llm:
        (whole,) = llm.generate([5, 6, 7], params, use_tqdm=False)
        deltas = list(llm.stream([5, 6, 7], params))
        assert [entry for delta in deltas for entry in delta.logprobs] == whole.outputs[0].logprobs
        assert deltas[-1].cumulative_logprob == whole.outputs[0].cumulative_logprob
        assert len(deltas) > 1


def test_leaving_a_stream_aborts_its_request_alone(scripted, engine):
    llm = scripted()
    other = llm.add_request("xyz", PARAMS)
    for _ in llm.stream("abc", PARAMS):
        break
    assert [run.request_id for run in engine.running] == [other]
    results = []
    while not llm.is_finished():
        results += llm.step()[0]
    assert [request_id for request_id, _ in results] == [other]


def test_a_request_that_fails_on_the_device_ends_with_error(scripted, engine, monkeypatch):
    llm, advance = scripted(), engine.advance

    def fail():
        step = advance()
        for update in step.updates:
            update.token_ids, update.finish_reason, update.stop_reason = [], "error", "lost"
        return step

    monkeypatch.setattr(engine, "advance", fail)
    (delta,) = llm.stream("abc", PARAMS)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "error", "lost")


def test_without_parameters_the_checkpoint_s_are_taken(scripted, engine):
    llm = scripted()
    assert "".join(delta.text for delta in llm.stream("abcdefghijklmnopqrstuvwxyz")) == (
        "abcdefghijklmnop"  # max_tokens is 16
    )


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda llm: llm.stream(""), ValueError, "the prompt is empty"),
        (lambda llm: llm.stream(["a", "b"]), TypeError, "token ids"),
        (lambda llm: llm.stream("a", [PARAMS] * 2), ValueError, "2 sampling_params"),
        (lambda llm: llm.stream("a", use_tqdm=False), TypeError, "no option 'use_tqdm'"),
        (lambda llm: llm.stream_chat([]), ValueError, "empty"),
        (lambda llm: llm.stream_chat([USER, USER]), TypeError, "message"),
        (lambda llm: llm.stream_chat(USER, documents=[1]), NotImplementedError, "documents"),
    ],
)
def test_a_wrong_call_is_refused_before_the_first_delta(scripted, engine, call, error, match):
    with pytest.raises(error, match=match):
        call(scripted())
    assert engine.num_added == 0


def test_what_the_engine_refuses_is_raised_at_the_first_delta(scripted, engine):
    engine.max_model_len = 8
    stream = scripted().stream("a long prompt")
    with pytest.raises(ValueError, match="the prompt has"):
        next(stream)
