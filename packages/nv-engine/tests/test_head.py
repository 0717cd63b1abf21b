"""The runner with another head than the draw: it adds up hidden states, and has no logits."""

import pytest
import torch
from nv_engine.batch import Batch
from nv_engine.device.buckets import Buckets
from nv_engine.device.captured_steps import CapturedSteps
from nv_engine.device.runner import Runner
from test_padded_steps import EagerGraphs
from test_runner import make_runner, random_rows
from transformers import AutoModel

CPU = torch.device("cpu")
LENGTHS = [10, 45, 16]
PIECES = [9, 16, 24, 32, 40]
"""Where prompts are cut. In the second step one ends with a row of one token, one with seven."""


class SumHead:
    """The sum of each sequence's hidden states, over all its chunks."""

    is_capturable, key = True, "sum"

    def __init__(self, num_slots, size):
        self.sums = torch.zeros(num_slots + 1, size)
        self.num_idle = self.num_resyncs = self.num_computed = 0
        self.error = None

    def update(self, batch):
        for admission in batch.admissions:
            self.sums[admission.slot] = 0
        return False

    def work(self, batch):
        self.batch = batch
        return self

    def expect_idle_step(self):
        self.num_idle += 1

    def resync(self):
        self.num_resyncs += 1

    def compute(self, hidden_TE, rows, step, layout, lora=None):
        assert hidden_TE.shape[0] == layout.num_tokens
        if self.error is not None:
            raise self.error
        self.num_computed += 1
        ends_S, index_T = rows.query_start[1:].contiguous(), torch.arange(layout.num_tokens)
        row_T = torch.searchsorted(ends_S, index_T, right=True)
        padding = len(self.sums) - 1
        slots_T = torch.cat([step.slots_S, torch.tensor([padding])])[row_T]  # of no row: padding
        self.sums.index_add_(0, slots_T, hidden_TE)
        return (self.sums[step.slots_S],)

    def finish(self, row_numbers, outputs, hidden_TE=None, lora=None):
        self.is_eager = hidden_TE is not None
        slots = [chunk.slot for chunk in self.batch.chunks]
        return dict(zip(slots, outputs[0][0, row_numbers], strict=True))


class BrokenGraphs(EagerGraphs):
    """The first capture fails, so that none is tried again."""

    def replay(self, key, batch, step, idle, num_steps=1):
        self.is_broken = True


def start(checkpoint, graphs=None):
    """A runner with such a head, and the head."""
    drawing = make_runner(checkpoint)
    head = SumHead(8, 64)
    parts = (drawing._model, drawing._backend, drawing._kv_caches, drawing._slots)
    runner = Runner(*parts, head, facts=drawing.facts)
    if graphs is not None:
        runner.use_graphs(CapturedSteps(graphs, Buckets(8, 512)))
    return runner, head


def run(runner, cuts):
    """Prompts in pieces that end at `cuts`, the sums, and the prompts."""
    rows, found = random_rows(LENGTHS), {}
    admissions = tuple(row.admission() for row in rows)
    appends = tuple(row.append() for row in rows)
    more = {"admissions": admissions, "appends": appends}
    for start_, stop in zip([0, *cuts], [*cuts, max(LENGTHS)], strict=True):
        left = [row for row in rows if len(row.tokens) > start_]
        left.sort(key=lambda row: min(len(row.tokens), stop) - start_)
        chunks = [row.prefill(start_, min(stop, len(row.tokens))) for row in left]
        found |= runner.run(Batch(tuple(chunks), **more))
        more = {}
    return found, rows


@pytest.fixture(scope="module")
def truth(checkpoint):
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def sum_of(token_ids):
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).last_hidden_state[0].sum(0)

    return sum_of


def check(found, rows, truth):
    assert len(found) == len(rows)
    for row in rows:
        torch.testing.assert_close(found[row.slot], truth(row.tokens), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("cuts", [[], [9, 16, 30], list(range(1, 45))], ids=str)
def test_a_head_without_logits_runs_on_the_same_runner(checkpoint, truth, cuts):
    runner, head = start(checkpoint)
    check(*run(runner, cuts), truth)
    assert head.is_eager
    assert head.num_computed == len(cuts) + 1
    assert (head.num_idle, head.num_resyncs) == (0, 0)


def test_its_steps_are_captured_and_each_run_before_a_capture_is_counted(checkpoint, truth):
    graphs = EagerGraphs(CPU)
    runner, head = start(checkpoint, graphs)
    for _ in range(2):
        check(*run(runner, PIECES), truth)
    assert graphs.num_replays > 5
    assert not head.is_eager
    assert head.num_idle == len(graphs.keys) > 1
    assert head.num_resyncs == 0


def test_a_batch_whose_capture_fails_runs_eagerly_after_a_resync(checkpoint, truth):
    runner, head = start(checkpoint, BrokenGraphs(CPU))
    for _ in range(2):
        check(*run(runner, PIECES), truth)
    assert head.is_eager
    assert (head.num_idle, head.num_resyncs) == (1, 1)


def test_a_batch_that_breaks_off_is_counted_anew(checkpoint, truth):
    runner, head = start(checkpoint)
    head.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(runner, [])
    assert head.num_resyncs == 1
    head.error = None
    check(*run(runner, [20]), truth)
