"""Which captured graphs are kept; the capture itself is a card's (test_device_gpu.py)."""

from array import array
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
                               logprobs=(), values=array("q"))  # fmt: skip

    monkeypatch.setattr(Graphs, "_capture", capture)
    monkeypatch.setattr(module, "MAX_GRAPHS", 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: captures.append("waited"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    return Graphs(torch.device("cpu")), captures


def test_the_least_recently_used_graph_goes(made):
    graphs, captures = made
    values = array("q", [1])
    for key in ("a", "b", "c", "a", "d"):  # b is the one that nobody has used for longest
        assert graphs.replay(key, values, key, values) == ()
    assert [key in graphs for key in "abcd"] == [True, False, True, True]
    assert captures == ["a", "b", "c", "d", "waited"]  # the one that goes may still run
    graphs.replay("b", values, "b", values)
    assert captures[5:] == ["b", "waited"]
    assert "c" not in graphs
