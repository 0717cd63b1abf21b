"""When graphs are not to be used, or not any more; their steps run without a graph here."""

import pytest
import torch
from nv_engine import EngineRequest, SamplingParams
from nv_engine.device.control_tables import SlotTable
from nv_engine.device.inputs import Layout
from nv_engine.device.ring import ResultRing
from test_padded_steps import engine_of, graphs, mixed, shares

__all__ = ["graphs", "mixed", "shares"]  # fixtures


def finish(engine):
    """How each request ended, in the order of their ids."""
    ended = {}
    while engine.has_unfinished:
        for update in engine.step().updates:
            ended[update.request_id] = update.finish_reason
    return [reason for _, reason in sorted(ended.items())]


def ask(engine, count, **params):
    for number in range(count):
        engine.add(
            EngineRequest(
                [5 + number, 6, 7] * 4, SamplingParams(temperature=0, ignore_eos=True, **params)
            )
        )
    return finish(engine)


def prompt_layouts(graphs):
    return [key for key in graphs.keys if isinstance(key[0], Layout)]


def test_an_update_that_fails_half_way_leaves_no_graph(checkpoint, graphs, monkeypatch):
    """It may have moved a table: a graph would read memory that is another table's."""
    engine = engine_of(checkpoint)
    ask(engine, 1, max_tokens=6, repetition_penalty=1.5)
    num_drops, fit = graphs[0].num_drops, SlotTable.fit

    def fail(table, slot, *shape):
        fit(table, slot, *shape)
        if slot > 7:
            raise torch.OutOfMemoryError("none left")

    assert graphs[0].keys
    monkeypatch.setattr(SlotTable, "fit", fail)
    assert "error" in ask(engine, 10, max_tokens=6, repetition_penalty=1.5)
    assert graphs[0].num_drops > num_drops
    monkeypatch.setattr(SlotTable, "fit", fit)
    assert ask(engine, 10, max_tokens=6, repetition_penalty=1.5) == ["length"] * 10


def test_after_a_failed_capture_nothing_waits_for_the_device(checkpoint, graphs, monkeypatch):
    engine, waits = engine_of(checkpoint), []
    graphs[0].is_broken = True
    monkeypatch.setattr(ResultRing, "resync", waits.append)
    assert ask(engine, 3, max_tokens=20) == ["length"] * 3
    assert not waits
    assert not graphs[0].num_replays


@pytest.mark.parametrize("logprobs", [None, 1])
def test_only_steps_with_prompt_logprobs_run_without_graphs(checkpoint, graphs, logprobs):
    engine = engine_of(checkpoint)
    ask(engine, 8, max_tokens=2, prompt_logprobs=logprobs)
    before = len(prompt_layouts(graphs[0]))
    for _ in range(3):  # their slots are not all given to others
        ask(engine, 2, max_tokens=2)
    assert len(prompt_layouts(graphs[0])) > before


@pytest.mark.parametrize(("logprobs", "captured"), [(128, True), (129, False), (-1, False)])
def test_no_graph_keeps_many_logprobs(checkpoint, graphs, logprobs, captured):
    engine = engine_of(checkpoint)
    for _ in range(3):
        ask(engine, 3, max_tokens=3, logprobs=logprobs)
    assert bool(graphs[0].keys) == captured
