"""Which captured graphs are kept; the capture itself is a card's (test_device_gpu.py)."""

from array import array
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from nv_engine.device import graphs as module
from nv_engine.device.graphs import Graphs, Step


@pytest.fixture
def made(monkeypatch):
    """Graphs whose captures are counted and do nothing."""
    captures = []

    def in_parts(self, step, packed):
        yield
        captures.append(step.in_parts)
        return SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), packed=packed,
                               outputs=(), values=array("q"))  # fmt: skip

    monkeypatch.setattr(Graphs, "_in_parts", in_parts)
    monkeypatch.setattr(module, "MAX_GRAPHS", 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: captures.append("waited"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    return Graphs(torch.device("cpu")), captures


def test_the_least_recently_used_graph_goes(made):
    graphs, captures = made
    values = array("q", [1])
    for key in ("a", "b", "c", "a", "d"):  # b has not been used for longest
        assert graphs.replay(key, values, Step(key, idle), values) == ()
    assert [key in graphs for key in "abcd"] == [True, False, True, True]
    assert captures == ["a", "b", "c", "d", "waited"]  # the one that goes may still run
    graphs.replay("b", values, Step("b", idle), values)
    assert captures[5:] == ["b", "waited"]
    assert "c" not in graphs


@pytest.fixture
def captures(monkeypatch):
    """Captures that run at once, on a CPU: the pool of each, and what was allocated in it."""
    seen, pools = [], iter(range(100))

    def begin(pool, mode):
        seen.append((pool, []))

    def graph():
        return SimpleNamespace(
            replay=lambda: None, capture_begin=begin, capture_end=lambda: seen.append("end")
        )

    def zeros(size, **options):
        seen[-1][1].append(size)
        return torch.empty(0)

    fakes = {
        "Stream": lambda device: None, "stream": nullcontext, "CUDAGraph": graph,
        "synchronize": lambda device: None, "empty_cache": lambda: seen.append("emptied"),
        "graph_pool_handle": lambda: next(pools),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(module.torch, "zeros", zeros)
    return seen


def idle(packed):
    """The run of the first layers, for tests that do not look at it."""


def two_layers(packed):
    yield
    yield
    return ()


def run(graphs, key, in_parts=two_layers, first_layers=idle):
    step = Step(in_parts, first_layers)
    return graphs.replay(key, array("q", [1]), step, array("q", [0]))


def test_a_pool_begins_with_the_room_of_the_largest_step(captures):
    graphs = Graphs(torch.device("cpu"), room=1000)
    for key in "abab":
        run(graphs, key)
    first = ["emptied", (0, [1000]), "end", (0, []), "end"]
    assert captures == [*first, (0, []), "end"]
    graphs.drop()
    run(graphs, "a")
    assert captures[7:] == ["emptied", "emptied", (1, [1000]), "end", (1, []), "end"]


def test_without_a_known_room_none_is_taken(captures):
    run(Graphs(torch.device("cpu")), "a")
    assert captures == [(0, []), "end"]


def test_a_capture_that_finds_no_memory_tries_again_without_the_cache(captures):
    def step(packed):
        yield
        if captures and captures[-1] == (0, []) and "emptied" not in captures:
            raise torch.OutOfMemoryError("none left")
        return ()

    graphs = Graphs(torch.device("cpu"))
    assert run(graphs, "a", step) == ()
    assert captures == [(0, []), "end", "emptied", (0, []), "end"]
    assert "a" in graphs


def test_a_capture_that_fails_is_the_last(captures):
    """K6: steps run eagerly then, but for those that are captured."""
    graphs = Graphs(torch.device("cpu"))
    run(graphs, "a")

    def fail(packed):
        yield
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.warns(UserWarning, match="capture failed .operation not permitted.*eagerly"):
        assert run(graphs, "b", fail) is None
    assert [graphs.can_replay(key) for key in "abc"] == [True, False, False]
    assert run(graphs, "c") is None
    assert run(graphs, "a") == ()


def begin(graphs, key, in_parts=two_layers, first_layers=idle):
    return graphs.begin(key, Step(in_parts, first_layers), array("q", [0]))


def test_a_capture_goes_on_between_replays(captures):
    graphs, ran = Graphs(torch.device("cpu")), []
    run(graphs, "a")
    del captures[:]
    assert begin(graphs, "b", first_layers=ran.append)
    assert len(ran) == 1, "the first layers ran before it"
    assert captures == []
    for _ in range(2):
        assert graphs.is_capturing
        graphs.advance()
        assert run(graphs, "a") == ()
        assert "b" not in graphs
    assert captures == [(0, [])]
    graphs.advance()
    assert captures == [(0, []), "end"]
    assert "b" in graphs
    assert not graphs.is_capturing
    graphs.advance()  # nothing is left to do
    assert run(graphs, "b") == ()
    assert captures == [(0, []), "end"]


def test_a_capture_is_finished_before_another_begins_at_once(captures):
    graphs = Graphs(torch.device("cpu"))
    begin(graphs, "b")
    graphs.advance()
    run(graphs, "c")
    assert captures == [(0, []), "end", (0, []), "end"]
    assert "b" in graphs


def test_dropped_graphs_end_a_capture(captures):
    graphs = Graphs(torch.device("cpu"))
    begin(graphs, "b")
    graphs.advance()
    graphs.drop()
    assert captures == [(0, []), "end"]
    assert not graphs.is_capturing
    graphs.finish()
    assert "b" not in graphs


def test_a_capture_that_is_broken_off_is_the_last(captures):
    """As by another thread, which waits for the whole device; torch does not free such a pool."""

    def fail(packed):
        yield
        raise RuntimeError("the capture was invalidated")

    graphs = Graphs(torch.device("cpu"))
    run(graphs, "a")
    begin(graphs, "b", fail)
    graphs.advance()
    with pytest.warns(UserWarning, match="capture failed .the capture was invalidated.*eagerly"):
        graphs.advance()
    assert not graphs.is_capturing
    assert [graphs.can_replay(key) for key in "abc"] == [True, False, False]


def test_an_interrupt_ends_a_capture(captures):
    def interrupt(packed):
        yield
        raise KeyboardInterrupt

    graphs = Graphs(torch.device("cpu"))
    begin(graphs, "b", interrupt)
    graphs.advance()
    with pytest.raises(KeyboardInterrupt):
        graphs.advance()
    assert captures == [(0, []), "end"]
    assert not graphs.is_capturing
    assert "b" not in graphs


def test_nothing_is_captured_if_the_first_layers_fail(captures):
    def fail(packed):
        raise RuntimeError("none left")

    graphs = Graphs(torch.device("cpu"))
    with pytest.warns(UserWarning, match="capture failed .none left.*eagerly"):
        assert not begin(graphs, "b", first_layers=fail)
    assert not graphs.is_capturing
    assert not graphs.can_replay("b")
