"""Steps that run in larger captured ones until their own are captured; here without a graph."""

import pytest
import torch
from nv_engine.device import captured_steps as module
from nv_engine.device.buckets import Buckets
from nv_engine.device.captured_steps import CapturedSteps, StepKey
from nv_engine.device.inputs import Layout
from nv_engine.executor.local import LocalExecutor
from nv_engine.mixed import MixedSteps
from test_padded_steps import KINDS, EagerGraphs, graphs, mixed, run, shares

__all__ = ["graphs", "mixed", "shares"]  # fixtures
CPU = torch.device("cpu")
COUNT, STEPS = module.SHARED_COUNT, module.STEPS_OF_A_CAPTURE


def choices(max_num_seqs=512, mixed=None):
    graphs = EagerGraphs(CPU)
    return CapturedSteps(graphs, Buckets(max_num_seqs, 4096, mixed), shares=True), graphs


def decode(rows, context=1000):
    return Layout(rows, rows, rows, 1, context)


def prompts(decodes, rows, tokens, context=1000):
    return Layout(decodes, decodes + rows, decodes + tokens, tokens, context)


def come(captured, graphs, layouts, head="plain"):
    """The layout that each step runs in; a capture that is due begins after it."""
    found = []
    for layout in layouts:
        choice = captured.find(layout, head)
        found.append(choice and choice.key.layout)
        if choice is not None:
            graphs.keys.setdefault(choice.key)
            if choice.coming is not None:
                assert graphs.coming is None
                graphs.coming = choice.coming
    return found


def test_a_smaller_batch_runs_in_the_larger_graph_until_its_own_is_captured():
    captured, graphs = choices()
    assert come(captured, graphs, [decode(256)]) == [decode(256, 2048)]
    found = come(captured, graphs, [decode(230)] * (COUNT + STEPS + 3))
    assert found == [decode(256, 2048)] * (COUNT + STEPS - 1) + [decode(240, 2048)] * 4


@pytest.mark.parametrize("when", [1, 7, STEPS + 5])
def test_layouts_do_not_depend_on_when_a_capture_ends(when):
    """Else the same requests would get other bits in another run."""
    sizes = [256] * 3 + [230] * 60 + [100] * 50 + [230] * 9 + [3] * 40
    found = []
    for waits in (False, True):
        captured, graphs = choices()
        found.append([])
        for number, size in enumerate(sizes):
            found[-1] += come(captured, graphs, [decode(size)])
            if waits and number % when == 0:
                graphs.finish()
    assert found[0] == found[1]
    assert len(set(found[0])) == 4


def test_a_batch_that_grows_waits_for_few_captures():
    captured, graphs = choices()
    sizes = [come(captured, graphs, [decode(rows)])[0].num_rows for rows in range(1, 513)]
    assert sorted(set(sizes)) == [1, 8, 32, 128, 256, 512]
    assert all(size >= rows for rows, size in enumerate(sizes, 1))


def test_prompts_are_captured_at_once_in_a_size_that_others_share():
    captured, graphs = choices()
    first, *others = come(
        captured, graphs, [prompts(500, 5, tokens) for tokens in (1000, 700, 1900, 2048)]
    )
    assert first == prompts(512, 16, 2048, 2048)
    assert others == [first] * 3
    small = come(captured, graphs, [prompts(500, 2, 90)])
    assert small == [prompts(512, 16, 512, 2048)], "a quarter of the size is enough"
    assert come(captured, graphs, [prompts(500, 2, 600, 3000)]) == [prompts(512, 16, 2048, 4096)]
    assert come(captured, graphs, [prompts(0, 2, 600)]) == [prompts(0, 16, 2048, 2048)]


def test_only_steps_of_the_same_kind_share():
    captured, graphs = choices()
    come(captured, graphs, [decode(256), prompts(200, 3, 2000)])
    assert come(captured, graphs, [decode(250)], head="greedy") == [decode(256, 2048)]
    assert {key.head for key in graphs.keys} == {"plain", "greedy"}
    assert come(captured, graphs, [decode(5)]) == [decode(256, 2048)]
    assert come(captured, graphs, [prompts(0, 3, 100)]) == [prompts(0, 16, 512, 2048)]


def test_large_steps_share_nothing():
    captured, graphs = choices()
    large = prompts(100, 30, 9000)
    assert come(captured, graphs, [large] * 9) == [None] * 8 + [large]
    assert come(captured, graphs, [prompts(100, 30, 8999)]) == [None]


def test_full_steps_of_large_models_are_not_padded():
    captured, graphs = choices(mixed=MixedSteps())
    full = prompts(64, 2, 448)
    assert come(captured, graphs, [full]) == [prompts(64, 16, 448, 2048)]


def test_after_a_failed_capture_none_begins():
    captured, graphs = choices()
    come(captured, graphs, [decode(256)])
    graphs.is_broken = True
    assert come(captured, graphs, [decode(3)] * 50) == [decode(256, 2048)] * 50
    assert come(captured, graphs, [prompts(0, 3, 100)]) == [None]
    assert graphs.coming is None


def test_dropped_graphs_are_captured_anew():
    captured, graphs = choices()
    come(captured, graphs, [decode(256)] + [decode(3)] * COUNT)
    assert graphs.coming == StepKey(decode(4, 2048), "plain")
    graphs.drop()
    assert come(captured, graphs, [decode(3)] * 2) == [decode(8, 2048)] * 2
    assert come(captured, graphs, [decode(3)] * 100)[-1] == decode(4, 2048)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 7, 8, 100, 512])
def test_every_layout_fits_its_coarse_one(max_num_seqs):
    buckets, found = Buckets(max_num_seqs, 4096), set()
    for decodes in range(max_num_seqs + 1):
        for rows in {0, 1, max_num_seqs - decodes}:
            for tokens in (rows, 63, 513, 8192) if rows else (0,):
                exact = prompts(decodes, rows, max(rows, tokens), 900)
                if exact.num_rows == 0:
                    continue
                layout = buckets.layout(exact)
                coarse = buckets.coarse(layout)
                assert layout.fits(coarse), (layout, coarse)
                assert coarse.num_decodes <= max_num_seqs
                assert coarse.chunk_rows <= max_num_seqs
                found.add(coarse)
    assert len(found) <= 6 + 7 * 2 * 3


OPTIONS = [{}, {"max_in_flight": 0}, {"max_in_flight": 3, "max_burst": 4}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shares", [True])
def test_tokens_are_those_of_exact_steps(checkpoint, graphs, monkeypatch, options):
    monkeypatch.setattr(module, "STEPS_OF_A_CAPTURE", 3)
    monkeypatch.setattr(module, "SHARED_COUNT", 2)
    got = run(checkpoint, KINDS, lists=2, **options)
    assert graphs[0].num_begun >= 3
    assert graphs[0].coming is None, "nothing is left half done"
    monkeypatch.undo()
    assert got[0] == run(checkpoint, KINDS, lists=2, **options)[0]


class Waiting:
    """A runner with a capture that needs some parts, and a step that ends after some more."""

    def __init__(self, parts, waits):
        self.parts, self.waits, self.facts = parts, waits, None

    def run(self, batch):
        return self

    def use_wait(self, result):
        done = min(self.parts, self.waits)
        self.parts, self.waits = self.parts - done, self.waits - done

    def result(self):
        return "read"

    def finish_capture(self):
        self.parts = 0


def test_a_capture_goes_on_while_a_step_runs_and_ends_with_the_newest(monkeypatch):
    runner = Waiting(parts=10, waits=4)
    monkeypatch.setattr("nv_engine.executor.local.start_runner", lambda config: runner)
    executor = LocalExecutor(None)
    steps = [executor.submit(None) for _ in range(2)]
    assert steps[0].result() == "read"
    assert runner.parts == 6
    assert steps[1].result() == "read"
    assert runner.parts == 0
