"""Threads and forks: an LLM made in any thread works, and a fork of its process hangs nowhere."""

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys

import pytest
from nv_api import LLM, AsyncLLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
FIRST_ENGINES = """
import sys, threading
import nv_api
found = {}
def work(name, path):
    options = {"device": "cpu", "max_model_len": 64, "num_kvcache_blocks": 4}
    with nv_api.LLM(path, **options) as llm:
        params = nv_api.SamplingParams(temperature=0, max_tokens=2)
        found[name] = llm.chat([{"role": "user", "content": "a"}], params, use_tqdm=False)
threads = [threading.Thread(target=work, args=each) for each in enumerate(sys.argv[1:])]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == len(threads), found
"""
DAEMON = """
import sys, threading
from nv_api import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", max_model_len=64, num_kvcache_blocks=4)
params, begun = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), threading.Event()
def work():
    while True:
        for delta in llm.stream("ab", params):
            begun.set()
threading.Thread(target=work, daemon=True).start()
begun.wait()
sys.exit(3)
"""
AT_EXIT = """
import atexit, sys
def last():
    print(len(llm.generate("ab", params, use_tqdm=False)[0].outputs[0].token_ids), flush=True)
atexit.register(last)  # before nv's own handlers, so that it runs after them
from nv_api import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", max_model_len=64, num_kvcache_blocks=4)
params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
"""
SECONDS = 60  # after which a child that hangs is ended


def status_of(work):
    """How a forked child ended that did some work: 0, or the sentence of its RuntimeError."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(SECONDS)
        try:
            work()
            message = ""
        except RuntimeError as error:
            message = str(error)
        os.write(writing, message.encode())
        os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    assert status == 0, "it hung, or failed"
    with os.fdopen(reading) as stream:
        return stream.read()


@pytest.fixture
def llm(checkpoint):
    with LLM(checkpoint, device="cpu", num_kvcache_blocks=8, max_model_len=64) as made:
        yield made


def test_b05_first_engines_may_be_made_in_several_threads(checkpoint):
    command = [sys.executable, "-c", FIRST_ENGINES, *[checkpoint] * 3]
    subprocess.run(command, check=True, timeout=500)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("a", PARAMS, use_tqdm=False),
        lambda llm: llm.chat([{"role": "user", "content": "a"}], PARAMS, use_tqdm=False),
        lambda llm: llm.add_request("a", PARAMS),
        lambda llm: llm.step(),
        lambda llm: next(llm.stream_chat([{"role": "user", "content": "a"}], PARAMS)),
        lambda llm: llm.reset_prefix_cache(),
    ],
    ids=["generate", "chat", "add_request", "step", "stream", "reset_prefix_cache"],
)
def test_b08_a_fork_is_refused_at_once_and_its_parent_goes_on(llm, call):
    llm.add_request([5, 6, 7], PARAMS)
    llm.step()
    assert "made in another process" in status_of(lambda: call(llm))
    results = []
    while not llm.is_finished():
        results += llm.step()[0]
    assert [len(tokens) for _, tokens in results] == [3]


def test_b08_a_fork_drops_and_closes_what_it_inherited(checkpoint):
    llm = LLM(checkpoint, device="cpu", num_kvcache_blocks=8, max_model_len=64)
    stream = llm.stream_chat([{"role": "user", "content": "a"}], PARAMS)
    next(stream)

    def drop():
        nonlocal llm, stream
        stream.close()
        llm.close()
        del llm, stream
        gc.collect()

    assert status_of(drop) == ""
    assert [len(delta.token_ids) for delta in stream] == [1, 1]
    assert len(llm.generate("a", PARAMS, use_tqdm=False)[0]["token_ids"]) == 3
    llm.close()


def test_b08_a_fork_in_the_midst_of_a_step_is_refused(llm, monkeypatch):
    submit, forked = llm._session._engine.executor.submit, []

    def fork(batch):
        if not forked:
            forked.append(os.fork())
            signal.alarm(0 if forked[0] else SECONDS)
        return submit(batch)

    monkeypatch.setattr(llm._session._engine.executor, "submit", fork)
    try:
        output = llm.generate("a", PARAMS, use_tqdm=False)[0]
    except RuntimeError as error:
        os._exit(7 if not forked[0] and "made in another process" in str(error) else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(forked[0], 0)[1]) == 7
    assert len(output["token_ids"]) == 3


def test_b08_a_fork_may_make_an_llm_of_its_own(llm, checkpoint):
    expected = llm.generate("a", PARAMS, use_tqdm=False)[0]["token_ids"]

    def make():
        with LLM(checkpoint, device="cpu", num_kvcache_blocks=8, max_model_len=64) as own:
            assert own.generate("a", PARAMS, use_tqdm=False)[0]["token_ids"] == expected

    assert status_of(make) == ""


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_16_an_engine_is_not_copied_or_sent_away(kind, take):
    engine = object.__new__(kind)  # whatever it holds
    with pytest.raises(TypeError, match=rf"^{kind.__name__} holds a running engine, .* make one"):
        take(engine)


def test_16_the_interpreter_ends_while_a_daemon_thread_steps(checkpoint):
    for _ in range(3):
        command = [sys.executable, "-c", DAEMON, str(checkpoint)]
        ended = subprocess.run(
            command, check=False, timeout=2 * SECONDS, capture_output=True, text=True
        )
        assert ended.returncode == 3, ended.stderr


def test_16_the_main_thread_generates_at_the_interpreters_end(checkpoint):
    command = [sys.executable, "-c", AT_EXIT, str(checkpoint)]
    ended = subprocess.run(command, check=False, timeout=SECONDS, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "5\n"), ended.stderr
