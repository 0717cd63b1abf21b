"""Which captured graphs are kept; the capture itself is a card's (test_device_gpu.py)."""

from array import array
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from nv_engine.device import graphs as module
from nv_engine.device.graphs import Graphs


@pytest.fixture
def made(monkeypatch):
    """Graphs whose captures are counted and do nothing."""
    captures = []

    def capture(self, step, packed):
        captures.append(step)
        return SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), packed=packed,
                               outputs=(), values=array("q"))  # fmt: skip

    monkeypatch.setattr(Graphs, "_capture", capture)
    monkeypatch.setattr(module, "MAX_GRAPHS", 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: captures.append("waited"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    return Graphs(torch.device("cpu")), captures


def test_the_least_recently_used_graph_goes(made):
    graphs, captures = made
    values = array("q", [1])
    for key in ("a", "b", "c", "a", "d"):  # b has not been used for longest
        assert graphs.replay(key, values, key, values) == ()
    assert [key in graphs for key in "abcd"] == [True, False, True, True]
    assert captures == ["a", "b", "c", "d", "waited"]  # the one that goes may still run
    graphs.replay("b", values, "b", values)
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


def run(graphs, key, step=lambda packed: ()):
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
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.warns(UserWarning, match="capture failed .operation not permitted.*eagerly"):
        assert run(graphs, "b", fail) is None
    assert [graphs.can_replay(key) for key in "abc"] == [True, False, False]
    assert run(graphs, "c") is None
    assert run(graphs, "a") == ()
