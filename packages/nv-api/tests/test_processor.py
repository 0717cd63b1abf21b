"""The processor as a server uses it: deltas as they come, snapshots in between."""

import gc
import threading
from contextlib import suppress
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nv_api.collector import CollectorPause, uncollected
from nv_api.completion import Completion
from nv_api.processor import Processor
from nv_api.prompts import TokenPrompt
from nv_api.session import Session
from nv_api.structured import grammar_compiler
from nv_api.tokenizer import Tokenizer
from nv_engine import SamplingParams
from tqdm import tqdm

EOS = 256


@pytest.fixture
def tokenizer(byte_level):
    return Tokenizer(byte_level)


def prompt_of(tokenizer, text):
    (ids,) = tokenizer.encode([text])
    return TokenPrompt(text, ids)


def deltas(engine, processor, request):
    """Every delta of a request's first completion."""
    given = []
    while not request.finished:
        processor.process(engine.step().updates)
        given.append(request.completions[0].delta())
    return given


@pytest.mark.parametrize("burst", [1, 2, 7])
def test_deltas_joined_are_the_output(engine, tokenizer, burst):
    engine.burst = burst
    processor = Processor(engine, tokenizer, grammar_compiler(lambda: None, engine))
    prompt = prompt_of(tokenizer, "héllo, 日本 🎉")
    (request,) = processor.add([prompt], [SamplingParams(max_tokens=100)])
    given = deltas(engine, processor, request)
    assert "".join(delta.text for delta in given) == request.output()["text"] == prompt.text
    assert [token for delta in given for token in delta.token_ids] == [*prompt.token_ids, EOS]
    assert not any("\ufffd" in delta.text for delta in given)
    assert not processor.has_unfinished


@pytest.mark.parametrize("include", [False, True])
def test_no_part_of_a_stop_string_is_in_a_delta(engine, tokenizer, include):  # N35
    processor = Processor(engine, tokenizer, grammar_compiler(lambda: None, engine))
    params = SamplingParams(stop=["OPS"], include_stop_str_in_output=include, max_tokens=100)
    (request,) = processor.add([prompt_of(tokenizer, "an OOPS here")], [params])
    given = [delta.text for delta in deltas(engine, processor, request)]
    assert "".join(given) == request.output()["text"] == ("an OOPS" if include else "an O")
    assert not any("P" in text for text in given[:-1])


@given(
    letters=st.text("abc", min_size=1, max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=2),
    cuts=st.sets(st.integers(1, 11)),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_streamed_or_not_however_the_steps_are_cut(
    byte_level, letters, stops, cuts, include, min_tokens
):
    tokenizer = Tokenizer(byte_level)
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=99
    )
    ids = prompt_of(tokenizer, letters).token_ids

    def run(edges):
        completion = Completion(0, params, tokenizer.detokenizer(params, []))
        shown = ""
        for begin, end in pairwise(edges):
            reason = "length" if end == len(ids) else None
            ended = completion.extend(ids[begin:end], reason)
            shown += completion.delta().text
            if ended:
                break
        assert shown == completion.text
        return completion.output()

    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    assert run(edges) == run(range(len(ids) + 1)) == run([0, len(ids)])


class Interrupted(BaseException):
    """As a signal handler raises it."""


@pytest.mark.parametrize("where", ["push", "flush"])
@pytest.mark.parametrize("stop", [None, "xy", "dé!"])
@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_a_read_that_was_interrupted_is_done_again(request, monkeypatch, kind, stop, where):
    """The detokenizer had the tokens already, and the stop strings perhaps the text."""
    tokenizer = Tokenizer(request.getfixturevalue(kind))
    (ids,) = tokenizer.encode(["abcdé!"], add_special_tokens=False)
    params = SamplingParams(stop=stop, max_tokens=99)

    def run(at):
        detokenizer, count = tokenizer.detokenizer(params, []), iter(range(100))
        completion = Completion(0, params, detokenizer)
        for owner in filter(None, (detokenizer, completion._stops)):
            call = getattr(owner, where)
            monkeypatch.setattr(owner, where, partial(interrupting, call, count, at), raising=False)
        shown = ""
        for position, token in enumerate(ids, 1):
            ended, reason = None, "length" if position == len(ids) else None
            while ended is None:
                with suppress(Interrupted):
                    completion.begin()
                    ended = completion.extend([token], reason)
            completion.begun = None
            before = completion._given
            try:
                shown += completion.delta().text
            except Interrupted:
                assert completion._given == before
                shown += completion.delta().text
            if ended:
                break
        return shown, completion.output()

    def interrupting(call, count, at, *args, **options):
        result = call(*args, **options)
        if next(count) == at:
            raise Interrupted
        return result

    whole = run(at=None)
    assert whole[0] == whole[1].text == ("abc" if stop == "dé!" else "abcdé!")
    assert [run(at) for at in range(20)] == [whole] * 20


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, ("a\ufffd", "length", None)),
        ("x", ("a\ufffd", "length", None)),
        ("\ufffd", ("a", "stop", "\ufffd")),
    ],
)
def test_a_character_cut_short_is_text_at_the_end(byte_level, stop, expected):
    tokenizer = Tokenizer(byte_level)
    (ids,) = tokenizer.encode(["aé"], add_special_tokens=False)
    params = SamplingParams(stop=stop, max_tokens=2)
    completion = Completion(0, params, tokenizer.detokenizer(params, []))
    assert completion.extend(ids[:2], "length")
    output = completion.output()
    assert (output.text, output.finish_reason, output.stop_reason) == expected


def test_snapshots_grow(engine, tokenizer):
    processor = Processor(engine, tokenizer, grammar_compiler(lambda: None, engine))
    (request,) = processor.add([prompt_of(tokenizer, "abc")], [SamplingParams(n=2)])
    seen = []
    while processor.has_unfinished:
        processor.process(engine.step().updates)
        output = request.output()
        seen.append((output["text"], output.outputs[1].text, output.finished))
    assert seen == [
        ("a", "b", False),
        ("ab", "bc", False),
        ("abc", "bc", False),
        ("abc", "bc", True),
    ]


def test_a_completion_that_its_text_ended_is_aborted_while_its_siblings_run(engine, tokenizer):
    engine.answers = [tokenizer.encode(["ab STOP and more"])[0]]  # the second begins at "b"
    processor = Processor(engine, tokenizer, grammar_compiler(lambda: None, engine))
    params = SamplingParams(n=2, max_tokens=30, stop="STO")
    (request,) = processor.add([TokenPrompt("x", [5])], [params])
    while not request.completions[1].finished:
        processor.process(engine.step().updates)
    assert engine.aborted == [(0, 1)]
    assert [run.index for run in engine.running] == [0]
    processor.process(engine.step().updates)
    assert engine.aborted == [(0, 1), (0, 0)]
    assert [completion.text for completion in request.completions] == ["ab ", "b "]
    assert not processor.has_unfinished


def test_an_aborted_request_ends_with_what_it_has(engine, tokenizer):
    processor = Processor(engine, tokenizer, grammar_compiler(lambda: None, engine))
    (request,) = processor.add([prompt_of(tokenizer, "abc")], [SamplingParams(stop=["bcd"])])
    processor.process(engine.step().updates)
    processor.process(engine.step().updates)
    assert request.completions[0].delta().text == "a"
    processor.abort(request.request_id)
    assert request.completions[0].delta().text == "b"
    completion = request.output().outputs[0]
    assert (completion.text, completion.finish_reason) == ("ab", "abort")
    assert engine.running == []


def test_an_error_ends_one_request_and_keeps_its_reason(engine, tokenizer):
    processor = Processor(engine, tokenizer, grammar_compiler(lambda: None, engine))
    bad, good = processor.add([prompt_of(tokenizer, text) for text in "ab"], [SamplingParams()] * 2)
    updates = engine.step().updates
    updates[0].token_ids, updates[0].finish_reason = [], "error"
    updates[0].stop_reason = "out of memory"
    processor.process(updates)
    completion = bad.output().outputs[0]
    assert (completion.text, completion.finish_reason) == ("", "error")
    assert completion.stop_reason == "out of memory"
    assert not good.finished


def test_closing_a_stream_aborts_it(engine, tokenizer):
    session = Session(engine, tokenizer)
    stream = session.stream(prompt_of(tokenizer, "abc"), SamplingParams())
    assert next(stream).text == "a"
    stream.close()
    assert session.finished
    assert engine.running == []


def test_a_stream_keeps_what_others_finish(engine, tokenizer):
    session = Session(engine, tokenizer)
    (other,) = session.add([prompt_of(tokenizer, "x")], [SamplingParams()])
    stream = session.stream(prompt_of(tokenizer, "abc"), SamplingParams())
    assert "".join(delta.text for delta in stream) == "abc"
    (finished,), _ = session.step()
    assert finished == (other.request_id, other.completions[0].token_ids)


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_before_the_first_step(engine, tokenizer, monkeypatch, enabled):
    """The device would wait; afterwards the collector is as it was, also after an error."""
    session, seen = Session(engine, tokenizer), []

    def note(call):
        def noted(*args, **options):
            seen.append(gc.isenabled())
            return call(*args, **options)

        return noted

    monkeypatch.setattr(engine, "add_list", note(engine.add_list))
    monkeypatch.setattr(engine, "advance", note(engine.advance))
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        session.run([prompt_of(tokenizer, "abc")], [SamplingParams()], False)
        assert seen[:2] == [False, False]
        assert seen[2:] == [enabled] * len(seen[2:])
        assert len(seen) > 2
        assert gc.isenabled() == enabled
        monkeypatch.setattr(engine, "add_list", None)
        with pytest.raises(TypeError):
            session.run([prompt_of(tokenizer, "abc")], [SamplingParams()], False)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_a_thread_that_is_refused_leaves_the_collector_alone(engine, tokenizer):
    session = Session(engine, tokenizer)
    refused = []

    def other():
        try:
            session.run([prompt_of(tokenizer, "x")], [SamplingParams()], False)
        except RuntimeError:
            refused.append(gc.isenabled())

    with session._alone():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert refused == [gc.isenabled()]


@pytest.fixture
def collecting():
    """The collector runs and nothing is frozen; afterwards it is as it was."""
    was_enabled = gc.isenabled()
    gc.enable()
    gc.unfreeze()
    yield
    gc.unfreeze()
    (gc.enable if was_enabled else gc.disable)()


def test_steps_do_not_collect_what_was_there_before(engine, tokenizer, monkeypatch, collecting):
    session, seen = Session(engine, tokenizer), []
    advance = engine.advance
    monkeypatch.setattr(
        engine, "advance", lambda: (seen.append(gc.get_freeze_count()), advance())[1]
    )
    session.run([prompt_of(tokenizer, "abc")], [SamplingParams()], False)
    assert seen[0] == 0
    assert min(seen[1:]) > 10_000
    assert gc.get_freeze_count() == 0


def test_a_pause_that_has_ended_changes_nothing_any_more(collecting):
    pause = CollectorPause()
    pause.begin()
    assert not gc.isenabled()
    pause.narrow()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000
    pause.end()
    assert gc.get_freeze_count() == 0
    gc.disable()
    gc.freeze()
    pause.narrow()
    pause.end()
    assert not gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_a_pause_within_a_pause_leaves_its_objects_frozen(collecting):
    outer, inner = CollectorPause(), CollectorPause()
    for pause in (outer, inner):
        pause.begin()
        pause.narrow()
    inner.end()
    assert gc.get_freeze_count() > 10_000
    outer.end()
    assert gc.get_freeze_count() == 0


def test_what_a_program_froze_stays_frozen(engine, tokenizer, collecting):
    gc.freeze()
    Session(engine, tokenizer).run([prompt_of(tokenizer, "abc")], [SamplingParams()], False)
    assert gc.get_freeze_count() > 10_000


def test_a_start_collects_nothing(collecting):
    seen = []
    with pytest.raises(ZeroDivisionError), uncollected():
        seen.append(gc.isenabled() / 0)
    with uncollected():
        seen.append(gc.isenabled())
    assert seen == [False]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_call_from_within_a_bar_may_finish_what_its_caller_waits_for(engine, tokenizer):
    session = Session(engine, tokenizer)
    inner = []

    def bar(**options):
        inner.extend(session.run([prompt_of(tokenizer, "xy")], [SamplingParams()], False))
        return tqdm(disable=True)

    (outer,) = session.run([prompt_of(tokenizer, "a")], [SamplingParams()], bar)
    assert [output.outputs[0].text for output in (*inner, outer)] == ["xy", "a"]
    assert session.finished
