"""A step that is broken off at any of its lines: what it could not return comes with the next."""

import ctypes
import importlib.util
import signal
import sys
from contextlib import contextmanager
from functools import partial
from itertools import count, repeat
from pathlib import Path

import nv_api
import nv_engine
import pytest
from nv_api import LLM, LoRARequest, SamplingParams
from nv_api.session import Session

BESIDE = Path(__file__).parents[2] / "nv-models/tests"
PLACES = tuple(str(next(iter(package.__path__))) for package in (nv_api, nv_engine))


def beside(name):
    spec = importlib.util.spec_from_file_location(name, BESIDE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BrokenOff(BaseException):
    """As a signal handler raises it."""


class Breaker:
    """Raises at the k-th line that runs below a call, in the files of these packages."""

    def __init__(self, at, names):
        self.left, self.names = at, names

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.call)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def call(self, frame, *_):
        path = frame.f_code.co_filename
        return self.line if path.startswith(PLACES) and path.endswith(self.names) else None

    def line(self, _, event, __):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise BrokenOff
        return self.line


WAY_BACK = ("scheduler.py", "sequence.py", "processor.py", "nv_api/request.py", "completion.py",
            "detokenizer.py", "stopping.py", "nv_api/logprobs.py", "session.py", "llm.py",
            "engine.py")  # fmt: skip
REQUESTS = {
    "plain": ([11, 12, 13], {"max_tokens": 3}),
    "several": ([21, 22], {"n": 2, "seed": 5, "temperature": 1, "max_tokens": 2}),
    "logprobs": ([31, 32], {"logprobs": 2, "prompt_logprobs": 1, "max_tokens": 2}),
    "stop": ([41, 42], {"max_tokens": 4}),
}


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, device="cpu", num_kvcache_blocks=16, max_model_len=64) as made:
        yield made


def ask(llm, stop):
    """Queue every kind of request; their ids by name."""
    ids = {}
    for name, (prompt, fields) in REQUESTS.items():
        params = SamplingParams(**{"temperature": 0, "ignore_eos": True, **fields})
        params.stop = stop if name == "stop" else None
        ids[llm.add_request(prompt, params)] = name
    return ids


def kept(llm, monkeypatch):
    """The end of every request, as `RequestOutput`s, for what `step` leaves out."""
    made = []
    original = llm._session._processor._request

    def note(*args):
        made.append(original(*args))
        return made[-1]

    monkeypatch.setattr(llm._session._processor, "_request", note)
    return made


def said(request):
    """All that a user can see of a request."""
    output = request.output()
    return [
        (each.text, each.token_ids, each.logprobs, each.finish_reason, each.stop_reason)
        for each in output.outputs
    ], output.prompt_logprobs


@pytest.fixture(scope="module")
def stop(llm):
    """A stop string that the request of that name meets at its third token."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=4)
    tokens = llm.generate([REQUESTS["stop"][0]], params, use_tqdm=False)[0]["token_ids"]
    texts = [llm._tokenizer.token_text(token) for token in tokens]
    return texts[1] + texts[2] if all(texts[1:3]) else texts[2]


def drive(llm, stop, monkeypatch, numbers):
    """Run all requests by hand, each step broken off at its next number of lines, if it has it."""
    llm.reset_prefix_cache()
    with monkeypatch.context() as patched:
        made = kept(llm, patched)
        ids = ask(llm, stop)
        pairs, num_broken = [], 0
        while not llm.is_finished():
            try:
                with Breaker(next(numbers), WAY_BACK):
                    pairs += llm.step()[0]
            except BrokenOff:
                num_broken += 1
        names = sorted((ids[request_id], tokens) for request_id, tokens in pairs)
        return names, [said(request) for request in made], num_broken


def test_a_step_broken_off_at_any_line_loses_nothing_and_repeats_nothing(llm, stop, monkeypatch):
    *whole, num_broken = drive(llm, stop, monkeypatch, repeat(10**9))
    numbers, total = count(1), 0
    while num_broken or not total:  # then the numbers are beyond the lines of any step
        *disturbed, num_broken = drive(llm, stop, monkeypatch, numbers)
        assert disturbed == whole
        total += num_broken
    assert total > 300


class Interrupter:
    """Notes SIGINT from the event after the k-th in one of some functions on.

    An event is a call that they make, or its return, or their own. The signal is noted by a
    profiler in C: in a Python function its handler would run at once.
    """

    note = ctypes.pythonapi["PyErr_SetInterrupt"]
    note.argtypes = [ctypes.py_object] * 3

    def __init__(self, *functions):
        self.codes = {function.__code__ for function in functions}
        self.left = 0

    def watch(self, frame, *_):
        if {frame.f_code, frame.f_back.f_code} & self.codes:
            self.left -= 1
            if self.left == 0:
                sys.setprofile(self.note)


def test_16_a_signal_while_step_returns_loses_nothing(llm):
    """After whichever call in it, and between any two of the returns from `Session.step` up."""
    functions = (Session.step, LLM.step, getattr(LLM.step, "__wrapped__", LLM.step))
    interrupter = Interrupter(*functions)
    place, left, num_raised, lengths = 0, 0, 0, range(1, 6)
    before = signal.signal(signal.SIGINT, len)  # a handler that raises a TypeError
    try:
        while left <= 0:  # then the places are beyond the events of any step
            place, left, results = place + 1, place + 1, []
            params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
            ids = [llm.add_request([5], each) for each in params]
            for turn in range(100):  # each second step is left alone, or none would end
                interrupter.left = place if turn % 2 else 10**9
                is_quiet = False
                try:
                    sys.setprofile(interrupter.watch)
                    results += llm.step()[0]
                    sys.setprofile(None)
                except TypeError:
                    num_raised += 1
                while not is_quiet:
                    try:
                        sys.setprofile(None)
                        is_quiet = True
                    except TypeError:
                        continue
                left = min(left, interrupter.left)
                if llm.is_finished():
                    break
            assert [(i, len(tokens)) for i, tokens in results] == [*zip(ids, lengths, strict=True)]
    finally:
        signal.signal(signal.SIGINT, before)
    assert place > 15
    assert num_raised > 2 * place


TO_THE_ENGINE = ("processor.py", "session.py", "engine.py")


def broken_at(numbers, names, call):
    """Break a call off at one of its lines after the other; yields each time."""
    for number in numbers:
        try:
            with Breaker(number, names):
                call()
        except BrokenOff:
            yield number
        else:
            return


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_16_a_call_broken_off_on_its_way_leaves_no_request(llm, call):
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1)
    streams = []

    def first_delta():
        streams[:] = [llm.stream([11, 12], params)]
        next(streams[0])

    calls = {
        "generate": lambda: llm.generate([[11, 12], [13]], params, use_tqdm=False),
        "stream": first_delta,
    }
    engine, num_broken = llm._session._engine, 0
    for num_broken in broken_at(range(1, 800), TO_THE_ENGINE, calls[call]):
        while engine.has_unfinished and not llm._session._processor.has_unfinished:
            engine.step()  # what the next call of the LLM would do
        assert llm.is_finished(), num_broken
        assert not engine.has_unfinished, num_broken
    assert num_broken > 100


def test_16_an_adapter_broken_off_while_it_is_added_is_added_by_the_next_call(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    base = beside("tiny_models").write_tiny_model(folder / "base", "Qwen3")
    path = beside("adapter_writer").write_adapter(folder / "adapter", base)
    options = {"enable_lora": True, "skip_tokenizer_init": True, "num_kvcache_blocks": 16}
    params, ids = SamplingParams(max_tokens=1), count(1)
    with LLM(str(base), device="cpu", max_model_len=64, **options) as made:
        engine = made._session._engine
        threads = engine._library, engine.executor._runner._adapters
        for names in ("adapter_library.py", "device/adapters.py"):
            for number in count(1):
                for each in threads:
                    each._thread = None  # so that it is started anew
                adapter = LoRARequest("a", next(ids), str(path))
                ask = partial(made.generate, [[11]], params, False, adapter)
                try:
                    with Breaker(number, (names,)):
                        ask()
                    break
                except BrokenOff:
                    with time_limit(20):
                        assert ask()[0].outputs[0].finish_reason == "length"
            assert number > 10


@contextmanager
def time_limit(seconds):
    """Raise TimeoutError in a block that does not end."""

    def end(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
