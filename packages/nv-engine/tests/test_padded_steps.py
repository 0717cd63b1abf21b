"""Steps padded to buckets, as graphs run them, give what exact steps give; here without a graph."""

from dataclasses import replace

import nv_kernels as nk
import pytest
import torch
from nv_engine import Engine, EngineConfig, EngineRequest, SamplingParams
from nv_engine.batch import Chunk
from nv_engine.device import buckets as sizes
from nv_engine.device import inputs
from nv_engine.device.buckets import LARGE_STEP_COUNT, Buckets
from nv_engine.device.captured_steps import CapturedSteps
from nv_engine.device.ring import ResultRing
from nv_engine.device.slots import Slots
from nv_engine.device.start import start_runner
from nv_engine.device.upload import upload
from nv_engine.mixed import MixedSteps
from nv_models import whole

CPU = torch.device("cpu")


class EagerGraphs:
    """What `Graphs` offers, each step run at once: first with idle values, as before a capture."""

    def __init__(self, device):
        self.device, self.keys, self.num_replays = device, {}, 0
        self.is_broken, self.num_drops = False, 0
        self.coming, self.num_begun = None, 0

    def __contains__(self, key):
        return key in self.keys

    def can_replay(self, key):
        return key in self.keys or not self.is_broken

    def replay(self, key, values, step, idle, num_steps=1):
        assert len(values) == len(idle)
        assert self.can_replay(key)
        if key not in self.keys:
            self.finish()
            self.keys[key] = None
            step.first_layers(upload(idle, torch.int64, self.device))
        self.num_replays += 1
        packed = upload(values, torch.int64, self.device)
        steps = [whole(step.in_parts(packed)) for _ in range(num_steps)]
        return tuple(torch.stack(parts) for parts in zip(*steps, strict=True))

    @property
    def is_capturing(self):
        return self.coming is not None

    def begin(self, key, step, idle):
        assert not self.is_capturing
        step.first_layers(upload(idle, torch.int64, self.device))
        self.coming, self.num_begun = key, self.num_begun + 1
        return not self.is_broken

    def finish(self):
        if self.coming is not None:
            self.keys[self.coming] = self.coming = None

    def drop(self):
        self.num_drops += 1
        self.keys.clear()
        self.coming = None


@pytest.fixture
def mixed():
    """How prompts come in beside decoding rows: a test's parameter may say otherwise."""
    return


@pytest.fixture
def shares():
    """Whether steps run in larger ones; a test may have another value as its parameter."""
    return False


@pytest.fixture
def graphs(monkeypatch, mixed, shares):
    """Every runner started from now on pads its steps; a list of their graphs."""
    made = []

    def start(config):
        runner = start_runner(config)
        runner.facts = replace(runner.facts, mixed_steps=mixed)
        buckets = sizes.Buckets(config.max_num_seqs, runner.facts.max_model_len, mixed)
        made.append(EagerGraphs(CPU))
        runner.use_graphs(CapturedSteps(made[-1], buckets, shares=shares), num_first_layers=1)
        return runner

    monkeypatch.setattr("nv_engine.executor.local.start_runner", start)
    return made


def engine_of(checkpoint, **options):
    defaults = {"kvcache_block_size": 16, "max_num_seqs": 12, "max_num_batched_tokens": 64}
    return Engine(EngineConfig(model=str(checkpoint), device="cpu", **defaults | options))


def run(checkpoint, kinds, lists=1, **options):
    engine, said = engine_of(checkpoint, **options), {}
    for _ in range(lists):
        for number, params in enumerate(kinds):
            prompt = [(7 * number + 3 * i) % 300 + 5 for i in range(9 + 11 * number)]
            said[engine.add(EngineRequest(prompt, params))] = []
        while engine.has_unfinished:
            for update in engine.step().updates:
                logprobs = [entry.logprobs for entry in update.logprobs or ()]
                said[update.request_id].append((update.token_ids, logprobs))
    engine.close()
    tokens = {key: [t for ids, _ in parts for t in ids] for key, parts in said.items()}
    logprobs = {key: [p for _, many in parts for p in many] for key, parts in said.items()}
    return list(tokens.values()), list(logprobs.values())


KINDS = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=12, top_k=20),
    SamplingParams(temperature=0, max_tokens=21, logprobs=2, repetition_penalty=1.3),
    SamplingParams(temperature=0.9, seed=5, max_tokens=17, min_tokens=9, frequency_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=9, logprobs=0),
    SamplingParams(temperature=1.0, seed=8, max_tokens=25),
    SamplingParams(temperature=0, max_tokens=14),
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_in_flight": 0},
        {"max_in_flight": 3, "max_burst": 4},
        {"num_kvcache_blocks": 14, "max_num_batched_tokens": 23},
        {"max_num_seqs": 3},
    ],
    ids=str,
)
def test_tokens_and_logprobs_are_those_of_exact_steps(checkpoint, graphs, monkeypatch, options):
    got = run(checkpoint, KINDS, **options)
    assert graphs[0].num_replays > 10
    assert any(isinstance(key[0], inputs.Layout) for key in graphs[0].keys)
    monkeypatch.undo()
    want = run(checkpoint, KINDS, **options)
    assert got[0] == want[0]
    for mine, theirs in zip(got[1], want[1], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a == pytest.approx(b, abs=1e-4)


def test_a_padded_layout_holds_the_exact_one():
    slots = Slots(6, 4, CPU)
    slots.tables.computed[:] = torch.tensor([9, 3, 0, 7, 2, 5, 0])
    slots.tables.last_token[:] = torch.arange(7) + 20
    slots.tables.block_table[:] = torch.randperm(28).view(7, 4)
    chunks = [
        Chunk(3, 7, 1, (), True),
        Chunk(1, 3, 1, (44,), False),
        Chunk(0, 9, 5, (1, 2, 3, 4, 5), True),
        Chunk(5, 0, 2, (8, 9), False),
    ]
    exact = inputs.layout_of(chunks)
    assert exact == inputs.Layout(2, 4, 9, 5, 14)
    padded = Buckets(6, 512).layout(exact)
    assert padded is not None
    assert padded.num_decodes > 2
    assert padded.num_tokens > 9
    reads = []
    for layout in (exact, padded):
        packed = upload(inputs.pack(chunks, layout, slots.padding), torch.int64, CPU)
        step = inputs.unpack(packed, layout)
        numbers = inputs.row_numbers(chunks, layout)
        rows = [row for row, chunk in zip(numbers, chunks, strict=True) if chunk.samples]
        assert step.slots_S[numbers].tolist() == [chunk.slot for chunk in chunks]
        assert step.drawn_slots_S[rows].tolist() == [3, 0]
        spare = set(range(layout.num_rows)) - set(rows)
        assert all(step.drawn_slots_S[row] == slots.padding for row in spare)
        sent = (step.token_ids_T, step.slots_S, step.starts_S, step.query_start)
        tables = replace(slots.tables, computed=slots.tables.computed.clone())
        forward = nk.step_rows(
            *sent, tables, num_decodes=layout.num_decodes, block_size=4, padding=slots.padding
        )
        real = forward.slot_mapping >= 0
        columns = (forward.token_ids, forward.positions, forward.slot_mapping)
        reads.append([column[real].tolist() for column in columns])
        lengths = forward.context_lens
        assert lengths[lengths > 0].tolist() == [8, 4, 14, 2]
        assert int(forward.query_start[-1]) == 7 + layout.num_decodes
        assert tables.computed.tolist() == [14, 4, 0, 8, 2, 2, 0]
    assert reads[0] == reads[1]
    assert reads[0][0] == [23, 44, 1, 2, 3, 4, 5, 8, 9]
    assert reads[0][1] == [7, 3, 9, 10, 11, 12, 13, 0, 1]


def test_the_ring_counts_what_the_device_counted():
    ring = ResultRing(4, 3, CPU)
    ring.expect(2)
    ring.tokens.count.add_(1)  # one of the two steps broke off
    ring.resync()
    (entry,) = ring.expect(1)
    assert entry.data_ptr() == ring.tokens.entries[1].data_ptr()


@pytest.mark.parametrize("mixed", [MixedSteps(38, 6)])
def test_prompts_come_in_pieces_beside_rows_that_decode(checkpoint, graphs, monkeypatch):
    got = run(checkpoint, KINDS)
    sizes = {key[0].num_tokens - key[0].num_decodes for key in graphs[0].keys
             if isinstance(key[0], inputs.Layout) and key[0].num_decodes}  # fmt: skip
    assert 6 in sizes
    monkeypatch.undo()
    want = run(checkpoint, KINDS)
    assert got[0] == want[0]


@pytest.mark.parametrize("max_num_seqs", [16, 100, 512])
def test_full_steps_have_few_layouts(max_num_seqs):
    mixed = MixedSteps()
    buckets, layouts = Buckets(max_num_seqs, 4096, mixed), set()
    for decodes in range(1, max_num_seqs):
        room = mixed.room(decodes)
        for rows in (1, 3):
            exact = inputs.Layout(decodes, decodes + rows, decodes + room, room, 1024)
            layouts.add(layout := buckets.layout(exact))
            assert layout.num_tokens - layout.num_decodes == room, "prompts are not padded"
            assert layout.num_tokens <= mixed.num_tokens or decodes > mixed.num_tokens - room
            assert buckets.least_count(layout) == 0
        part = exact._replace(num_tokens=decodes + room - 1)
        assert buckets.layout(part).num_tokens <= layout.num_tokens
    assert len(layouts) == 2 + (max_num_seqs - 1) // 32


@pytest.mark.parametrize("mixed", [None, MixedSteps()])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 4, 7, 8, 9, 100, 512])
def test_every_step_has_a_bucket_or_is_large(max_num_seqs, mixed):
    buckets = Buckets(max_num_seqs, 4096, mixed)
    for decodes in range(max_num_seqs + 1):
        for rows in {1, max_num_seqs - decodes} - {0}:
            for tokens in (rows, 63, 64, 65, 5000, 8192):
                exact = inputs.Layout(decodes, decodes + rows, decodes + tokens, tokens, 900)
                layout = buckets.layout(exact)
                assert layout is not None
                assert decodes <= layout.num_decodes <= max_num_seqs
                assert rows <= layout.num_rows - layout.num_decodes <= max_num_seqs
                assert tokens <= layout.num_tokens - layout.num_decodes
                assert (layout.max_context_len, layout.max_query_len >= tokens) == (2048, True)
                assert buckets.least_count(layout) <= 1


@pytest.mark.parametrize("decodes", [0, 3])
def test_a_large_step_is_captured_as_it_is_when_it_came_eight_times(decodes):
    exact = inputs.Layout(decodes, decodes + 27, decodes + 8193, 994, 1500)
    buckets = Buckets(512, 4096)
    assert buckets.layout(exact) == exact
    assert buckets.least_count(exact) == LARGE_STEP_COUNT == 8


def test_a_large_step_comes_from_a_graph_when_it_came_often(checkpoint, graphs, monkeypatch):
    """Lists of one shape again and again: its steps, prompts alone and mixed."""
    monkeypatch.setattr(sizes, "CHUNK_TOKENS", (4, 8))
    options = {"max_num_batched_tokens": 24, "max_num_seqs": 2, "enable_prefix_caching": False}
    params = [SamplingParams(temperature=0, max_tokens=2)] * 8  # prompts of 9 to 86 tokens
    got = run(checkpoint, params, lists=12, **options)
    large = [key[0] for key in graphs[0].keys if isinstance(key[0], inputs.Layout)]
    large = [layout for layout in large if layout.num_tokens - layout.num_decodes > 8]
    assert {layout.num_decodes for layout in large} == {0, 1}
    assert any(layout.num_tokens == 24 for layout in large)
    monkeypatch.undo()
    assert got == run(checkpoint, params, lists=12, **options)


def test_a_large_step_is_eager_eight_times(checkpoint, graphs, monkeypatch):
    monkeypatch.setattr(sizes, "CHUNK_TOKENS", (4, 8))
    options = {"max_num_seqs": 1, "enable_prefix_caching": False}
    params = [SamplingParams(temperature=0, max_tokens=1)]  # a prompt of 9 tokens
    for lists, captured in ((8, 0), (9, 1)):
        run(checkpoint, params, lists=lists, **options)
        assert len(graphs[-1].keys) == captured
