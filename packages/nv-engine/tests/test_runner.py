"""The device's wing alone, driven by hand-made batches, against transformers."""

import gc
import json
import random
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from nv_engine.batch import Admission, Batch, BlockAppend, BlockCopy, Chunk
from nv_engine.config import EngineConfig
from nv_engine.device import start
from nv_engine.device.buckets import batches
from nv_engine.device.memory import GIB
from nv_engine.device.runner import Runner
from nv_engine.device.sampling_tables import STOP_BYTES, SamplingTables
from nv_engine.device.slots import Slots, row_bytes
from nv_engine.device.start import choose_device, start_runner
from nv_engine.params import SamplingParams
from nv_models import ModelPlan, TensorParallel, plan_model
from nv_models.quantization.float_to_fp8 import FloatToFp8Scheme

BLOCK = 16
GREEDY = SamplingParams(temperature=0, max_tokens=None)


def make_runner(checkpoint: Path, **options: object) -> Runner:
    defaults = {"max_num_seqs": 8, "kvcache_block_size": BLOCK, "num_kvcache_blocks": 64}
    return start_runner(EngineConfig(model=str(checkpoint), device="cpu", **defaults | options))


@dataclass
class Row:
    """A sequence as the host would keep it."""

    slot: int
    tokens: list[int]
    blocks: list[int]
    params: SamplingParams = field(default_factory=lambda: GREEDY)
    seed: int = 7
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    def admission(self) -> Admission:
        return Admission(self.slot, self.params, self.seed, self.prompt_len, tuple(self.tokens))

    def append(self) -> BlockAppend:
        return BlockAppend(self.slot, 0, tuple(self.blocks))

    def prefill(self, start: int = 0, stop: int | None = None) -> Chunk:
        stop = len(self.tokens) if stop is None else stop
        ids = tuple(self.tokens[start:stop])
        return Chunk(self.slot, start, stop - start, ids, stop == len(self.tokens))

    def decode(self) -> Chunk:
        return Chunk(self.slot, len(self.tokens) - 1, 1, (), samples=True)


def step(runner: Runner, rows: list[Row], chunks: list[Chunk], **more: object) -> None:
    """Run a batch and append the tokens to the rows that sampled."""
    result = runner.run(Batch(chunks=tuple(chunks), **more)).result()
    sampling = [row for row, chunk in zip(rows, chunks, strict=True) if chunk.samples]
    for ids in result.token_ids:
        for row, token in zip(sampling, ids, strict=True):
            row.tokens.append(token)


def admit(runner: Runner, rows: list[Row]) -> None:
    admissions = tuple(row.admission() for row in rows)
    appends = tuple(row.append() for row in rows)
    step(runner, rows, [row.prefill() for row in rows], admissions=admissions, appends=appends)


def random_rows(lengths: list[int], **fields: object) -> list[Row]:
    rng = random.Random(5)
    blocks = list(range(64))
    rng.shuffle(blocks)
    return [
        Row(
            slot,
            [rng.randrange(3, 320) for _ in range(n)],
            [blocks.pop() for _ in range(5)],
            **fields,
        )
        for slot, n in zip([3, 0, 6, 5, 1], lengths, strict=False)
    ]


def test_batched_greedy_equals_transformers(checkpoint: Path, greedy) -> None:
    runner, rows = make_runner(checkpoint), random_rows([1, 15, 16, 17, 40])
    expected = [row.tokens + greedy(row.tokens, 24) for row in rows]
    admit(runner, rows)
    for _ in range(23):
        step(runner, rows, [row.decode() for row in rows])
    assert [row.tokens for row in rows] == expected


def test_chunks_mixed_with_decodes_equal_transformers(checkpoint: Path, greedy) -> None:
    runner = make_runner(checkpoint)
    first, second = random_rows([10, 45])
    expected = [row.tokens + greedy(row.tokens, 6) for row in (first, second)]
    admit(runner, [first])
    more = {"admissions": (second.admission(),), "appends": (second.append(),)}
    for first_token, stop in [(0, 7), (7, 30), (30, 31), (31, 45)]:
        step(runner, [first, second], [first.decode(), second.prefill(first_token, stop)], **more)
        more = {}
    step(runner, [first, second], [first.decode(), second.decode()])
    for _ in range(4):
        step(runner, [second], [second.decode()])
    assert first.tokens == expected[0]
    assert second.tokens == expected[1]


def test_a_burst_equals_single_steps(checkpoint: Path, greedy) -> None:
    runner, rows = make_runner(checkpoint, max_burst=8), random_rows([5, 14])
    expected = [row.tokens + greedy(row.tokens, 9) for row in rows]
    admit(runner, rows)
    step(runner, rows, [row.decode() for row in rows], num_steps=8)
    assert [row.tokens for row in rows] == expected


def test_a_copied_block_serves_another_sequence(checkpoint: Path, greedy) -> None:
    runner = make_runner(checkpoint, kvcache_block_size=32)
    first, second = random_rows([30, 30])
    second.tokens[:16] = first.tokens[:16]
    expected = second.tokens + greedy(second.tokens, 5)
    admit(runner, [first])
    step(
        runner,
        [second],
        [second.prefill(16)],
        admissions=(second.admission(),),
        appends=(second.append(),),
        copies=(BlockCopy(first.blocks[0], second.blocks[0], 16),),
    )
    for _ in range(4):
        step(runner, [second], [second.decode()])
    assert second.tokens == expected


def test_a_seeded_draw_ignores_neighbours_and_slots(checkpoint: Path) -> None:
    hot = SamplingParams(temperature=1.3, top_k=50, top_p=0.95, max_tokens=None)
    alone = Row(2, [9, 8, 7], [1, 2], hot, seed=2**63 + 11)
    runner = make_runner(checkpoint)
    admit(runner, [alone])
    for _ in range(10):
        step(runner, [alone], [alone.decode()])
    crowd = [Row(s, [s + 3] * (s + 4), [10 + s, 20 + s], hot, seed=s) for s in (0, 1, 4)]
    again = Row(7, [9, 8, 7], [3, 4], hot, seed=2**63 + 11)
    rows = [crowd[0], crowd[1], again, crowd[2]]
    admit(runner, rows)
    for _ in range(10):
        step(runner, rows, [row.decode() for row in rows])
    assert again.tokens == alone.tokens
    assert len(set(map(tuple, (row.tokens[-10:] for row in rows)))) == 4


@pytest.mark.parametrize("stop_token_ids", [None, [5, 6], list(range(3, 60))])
def test_min_tokens_forbids_every_stop_id(checkpoint: Path, stop_token_ids) -> None:
    params = SamplingParams(temperature=5.0, min_tokens=12, stop_token_ids=stop_token_ids)
    forbidden = {1, 2, *(stop_token_ids or ())}
    runner = make_runner(checkpoint)
    rows = [Row(slot, [slot + 60], [slot], params, seed=slot) for slot in range(8)]
    admit(runner, rows)
    for _ in range(14):
        step(runner, rows, [row.decode() for row in rows])
    drawn = [row.tokens[1:13] for row in rows]
    assert not forbidden & {token for tokens in drawn for token in tokens}
    if stop_token_ids and len(stop_token_ids) > 50:  # likely enough that freedom shows
        assert forbidden & {token for row in rows for token in row.tokens[13:]}


def test_sizes_follow_model_and_options(checkpoint: Path) -> None:
    runner = make_runner(checkpoint, max_model_len=4096, num_kvcache_blocks=-1)
    assert runner.facts.max_model_len == 512
    assert runner.facts.num_blocks == 8 * 512 // BLOCK
    assert make_runner(checkpoint, max_model_len=100).facts.max_model_len == 100
    assert make_runner(checkpoint, max_model_len=None).facts.max_model_len == 512
    assert runner.facts.eos_token_ids == (1, 2)


def test_limits_beyond_the_memory_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"max_num_seqs=2147483647 .* GiB .* lower max_num_seqs"):
        make_runner(checkpoint, max_num_seqs=2**31 - 1)


def test_weights_beyond_the_memory_are_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("nv_engine.device.start.available_host_memory", lambda: 23 * 2**30)
    with pytest.raises(
        ValueError, match=r"weights take \d+\.\d\d GiB .* may take 23\.00 GiB: free"
    ):
        make_runner(tmp_path, load_format="dummy")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention_backend": "triton"}, "'triton' needs a cuda device"),
        ({"num_kvcache_blocks": 10**9}, r"num_kvcache_blocks=1000000000 needs .*: use at most"),
    ],
)
def test_what_cannot_run_is_refused_before_weights_are_made(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], words: str
) -> None:
    monkeypatch.setattr(ModelPlan, "load", None)
    with pytest.raises(ValueError, match=words):
        make_runner(checkpoint, **options)


def test_a_promise_of_endless_positions_costs_what_is_used(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "endless"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 2**31 - 1
    (folder / "config.json").write_text(json.dumps(config))
    first, second = make_runner(checkpoint), make_runner(folder)
    assert second.facts.max_model_len == 4096
    rows, again = random_rows([9]), random_rows([9])
    admit(first, rows)
    admit(second, again)
    assert rows == again
    with pytest.raises(ValueError, match=r"max_model_len 2147483647 .*: lower max_model_len$"):
        make_runner(folder, max_model_len=None)


@pytest.mark.parametrize(("num_slots", "max_blocks"), [(3, 5), (64, 1)])
def test_the_bytes_of_a_slot_are_those_of_its_tables(num_slots: int, max_blocks: int) -> None:
    slots = Slots(num_slots, max_blocks, torch.device("cpu"))
    tables = SamplingTables(slots.tables, 320, (1,))
    num_bytes = sum(table.nbytes for table in vars(slots.tables).values())
    assert num_bytes == (num_slots + 1) * row_bytes(max_blocks)
    assert tables.stop_ids.nbytes == (num_slots + 1) * STOP_BYTES


@pytest.mark.parametrize("name", ["tpu", "meta", "cuda:-1x"])
def test_unknown_device(name: str) -> None:
    with pytest.raises(ValueError, match='use "auto", "cuda" or "cpu"'):
        choose_device(name, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a card")
def test_a_machine_without_a_card_is_an_error() -> None:
    with pytest.raises(ValueError, match='0 CUDA devices: use "cpu"'):
        choose_device("cuda", 0)
    assert choose_device("auto", 0).type == "cpu"


@pytest.mark.parametrize("max_num_seqs", [1, 3, 9, 12, 20, 100, 513])
def test_k1_every_batch_size_has_a_bucket(max_num_seqs: int) -> None:
    sizes = batches(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    assert all(any(size >= n for size in sizes) for n in range(1, max_num_seqs + 1))


@pytest.fixture
def garbage() -> Iterator[weakref.ref[Row]]:
    """An object in a cycle, as an earlier engine may leave; only a call of the collector frees it.

    On a card its tensors would count as weights, or be freed while a step is measured.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    row = Row(0, [], [])
    row.blocks.append(row)
    reference = weakref.ref(row)
    del row
    yield reference
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize(
    ("enforce_eager", "peaks"), [(False, (3, 5)), (False, (5, 3)), (True, (3, 5))]
)
def test_k3_graphs_and_the_sampler_are_in_the_budget(
    checkpoint, monkeypatch, garbage, enforce_eager, peaks
) -> None:
    """A card of 80 GiB is played: the trial steps run on the CPU, and their peaks are given."""
    config = EngineConfig(
        model=str(checkpoint), device="cpu", kvcache_block_size=BLOCK, max_num_seqs=6,
        max_num_batched_tokens=64, gpu_memory_utilization=0.95, enforce_eager=enforce_eager,
    )  # fmt: skip
    plan = start.plan_start(config, TensorParallel())
    make, try_out, ran = start._make_trial_runner, Runner.try_out, []
    monkeypatch.setattr(start, "_make_trial_runner", lambda _, *rest: make(plan, *rest))
    monkeypatch.setattr(
        Runner, "try_out", lambda runner, batch: ran.append(batch) or try_out(runner, batch)
    )
    left, collected = iter(peaks), []

    def peak_bytes(_: torch.device, work: Callable[[], object]) -> int:
        collected.append(garbage() is None)
        work()
        return next(left) * GIB

    monkeypatch.setattr(start, "peak_bytes", peak_bytes)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10 * GIB)
    card = replace(plan, device=torch.device("cuda", 0))
    num_blocks, graph_room = start._count_blocks(card, plan.model.load())

    assert collected == [True, True]
    prefill, decode = ran
    assert sum(chunk.num_tokens for chunk in prefill.chunks) == 64
    for batch in ran:
        assert len(batch.chunks) == 6  # every sequence that there may be draws
        assert all(chunk.samples for chunk in batch.chunks)
    assert [chunk.num_tokens for chunk in decode.chunks] == [1] * 6
    for each in prefill.admissions:  # with every filter, which is when the sampler takes the most
        assert each.params.temperature > 0
        assert 0 < each.params.top_p < 1
    assert graph_room == (0 if enforce_eager else 5 * GIB)
    used = 10 * GIB + peaks[0] * GIB + graph_room + start.SLACK_BYTES
    kv = num_blocks * plan.block_need.block_bytes
    assert used + kv <= int(0.95 * 80 * GIB) < used + kv + plan.block_need.block_bytes


@pytest.mark.parametrize("deterministic", [False, True])
def test_k7_the_deterministic_mode_has_its_own_products_and_attention(
    checkpoint, monkeypatch, deterministic
):
    """On a CPU its results are the same without them, or nearly always."""
    asked = []

    def plan(path, **options):
        asked.append(options["arithmetic"])
        return plan_model(path, **options)

    monkeypatch.setattr("nv_engine.device.start.plan_model", plan)
    runner = make_runner(checkpoint, deterministic=deterministic, dtype="bfloat16")
    assert asked == ["batch_invariant" if deterministic else "fast"]
    assert (runner._backend.name == "batch_invariant") == deterministic


@pytest.mark.parametrize("option", ["auto", "fp8"])
def test_a_checkpoint_may_have_scales_of_an_fp8_cache(
    checkpoint: Path, monkeypatch, option: str
) -> None:
    monkeypatch.setattr(FloatToFp8Scheme, "has_kv_scales", True)
    monkeypatch.setattr(FloatToFp8Scheme, "kv_scale_shape", lambda *_: (1,))
    monkeypatch.setattr("nv_models.causal.CausalLM.kv_scales", lambda self: [(0.5, 2.0)] * 2)
    options = {"quantization": "fp8", "load_format": "dummy"}
    runner = make_runner(checkpoint, kv_cache_dtype=option, **options)
    found = [(kv.k_scale, kv.v_scale, kv.is_fp8) for kv in runner._kv_caches]
    assert found == [(0.5, 2.0, True)] * 2
    rows = random_rows([20, 7])
    admit(runner, rows)
    step(runner, rows, [row.decode() for row in rows])
    assert [len(row.tokens) for row in rows] == [22, 9]


def test_a_cache_in_the_models_dtype_has_no_scales(checkpoint: Path, monkeypatch) -> None:
    monkeypatch.setattr("nv_models.causal.CausalLM.kv_scales", lambda self: [(0.5, 2.0)] * 2)
    runner = make_runner(checkpoint)
    assert [(kv.k_scale, kv.v_scale, kv.is_fp8) for kv in runner._kv_caches] == [(1, 1, False)] * 2
