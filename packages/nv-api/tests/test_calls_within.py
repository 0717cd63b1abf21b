"""Calls that come in the middle of a step: from a signal handler, a finalizer, another thread."""

import sys
import threading

import pytest
from nv_api import LLM, SamplingParams
from nv_engine import Engine
from nv_engine.scheduling.scheduler import Scheduler

PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8, 9]]
CALLS = {
    "generate": lambda llm: llm.generate([[4]], PARAMS, use_tqdm=False),
    "add_request": lambda llm: llm.add_request([4], PARAMS),
    "step": lambda llm: llm.step(),
    "stream": lambda llm: next(iter(llm.stream([4], PARAMS))),
    "abort_request": lambda llm: llm.abort_request(0),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
}


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, device="cpu", num_kvcache_blocks=16, max_model_len=64) as made:
        yield made


def run(llm):
    return [each["token_ids"] for each in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


class Within:
    """Makes a call once, at the k-th line of a function that every step passes."""

    def __init__(self, function, at, call):
        self.code, self.left, self.call = function.__code__, at, call

    def __enter__(self):
        sys.settrace(self.watch)

    def __exit__(self, *_):
        sys.settrace(None)

    def watch(self, frame, *_):
        return self.line if frame.f_code is self.code else None

    def line(self, _, event, __):
        self.left -= event == "line"
        if self.left == 0:
            sys.settrace(None)
            self.call()
        return self.line


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("function", [Engine._step, Scheduler.commit, Scheduler.schedule])
def test_16_a_signal_handler_cannot_call_into_a_step(llm, name, function):
    alone, errors = run(llm), []

    def handler():
        with pytest.raises(RuntimeError, match="in the middle of one of its own steps") as error:
            CALLS[name](llm)
        errors.append(error)

    for at in range(1, 9):
        with Within(function, at, handler):
            assert run(llm) == alone
    assert errors
    assert llm.is_finished()
    assert run(llm) == alone


@pytest.mark.parametrize("function", [Engine._step, Scheduler.commit, Scheduler.schedule])
def test_16_a_stream_collected_in_a_step_ends_with_the_next(llm, function):
    alone = run(llm)
    for at in range(1, 9):
        streams = [llm.stream([20 + at, 21], PARAMS)]
        next(streams[0])
        with Within(function, at, streams.clear):  # the last reference, as the collector's
            assert run(llm) == alone
        while not llm.is_finished():
            assert llm.step()[0] == []
        assert llm.get_metrics()["num_free_blocks"] == 16
    assert run(llm) == alone


@pytest.mark.parametrize("name", ["reset_prefix_cache", "close of a stream"])
def test_16_another_thread_does_not_reach_into_a_step(llm, name):
    alone, seen = run(llm), []
    stream = llm.stream([30, 31], PARAMS)
    next(stream)

    def reach():
        try:
            llm.reset_prefix_cache() if name == "reset_prefix_cache" else stream.close()
        except RuntimeError as error:
            seen.append(str(error))
        else:
            seen.append(llm._session._left[:])

    def in_a_thread():
        thread = threading.Thread(target=reach)
        thread.start()
        thread.join()

    with Within(Engine._step, 3, in_a_thread):
        assert run(llm) == alone
    stream.close()
    if name == "reset_prefix_cache":
        assert "another thread is using this LLM" in seen[0]
    else:
        assert len(seen[0]) == 1
    assert run(llm) == alone
    assert llm.is_finished()
