"""The Triton attention backend against the definition: in the interpreter, and on a card."""

from dataclasses import replace

import pytest
import torch
from attention_cases import assert_attends, step
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels.attention.metadata import AttentionMetadata, AttentionShape
from nv_kernels.attention.triton import backend as triton_backend
from nv_kernels.attention.triton import settings
from nv_kernels.attention.triton.backend import TritonAttention
from nv_kernels.cache.layout import KVLayout


def attend(case):
    backend = TritonAttention(case.shape, "a test")
    plan = backend.plan(case.metadata)[None]
    first = backend.attend(case.q, case.kv, case.metadata, plan, case.spec)
    assert first.isfinite().all()
    # A second layer finds the counters at 0 and computes the same bits.
    second = backend.attend(case.q, case.kv, case.metadata, plan, case.spec)
    assert torch.equal(first, second), (first.float() - second.float()).abs().amax((1, 2))
    return first


def check(rows, **options):
    case = step(rows, device=DEVICE, **options)
    assert_attends(attend(case), case.expected())


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


@on_device
@pytest.mark.parametrize(
    ("rows", "context", "longest", "expected"),
    [
        # With 129 tiles each, a third piece per row would start a second round.
        (16, 8230, 8230, {129: 1}),
        (16, 2000, 2000, {32: 1}),
        (16, 200, 200, {4: 1}),
        # One long row: neither a piece of 512 tiles nor pieces of 64.
        (16, 200, 32768, {4: 1, 35: 15}),
        (16, 640, 1600, {10: 1, 9: 3}),  # the long row is cut to a program's share, 11 tiles
        (16, 640, 832, {10: 1, 13: 1}),  # a row only a third longer than the others is not
    ],
)
def test_how_rows_are_cut(rows, context, longest, expected, monkeypatch):
    """8 processors are assumed to run 32 pieces at once; 64 tiles are a large piece."""
    monkeypatch.setattr(settings, "num_multiprocessors", lambda device: 8)
    shape = AttentionShape(torch.device(DEVICE), torch.bfloat16, 4, 2, 128, 256)
    lengths = [longest] + [context] * (rows - 1)
    plan, pieces = cut(shape, lengths)
    assert plan.settings.num_resident == 32
    assert plan.settings.max_tiles == 64
    for item, sizes in pieces.items():
        assert sum(sizes) == -(-lengths[item // 2] // 64)
        assert len(sizes) == expected.get(max(sizes))


@on_device
@pytest.mark.parametrize(
    ("context", "expected"),
    [(200, [1] * 7), (1024, [4] * 8), (1000, [4] * 8), (4096, [8] * 16), (32768, [8] * 128)],
)
def test_longer_pieces_rather_than_rounds_of_merging(context, expected, monkeypatch):
    """Eight partials of eight heads are merged at a time; 132 processors run 198 pieces."""
    monkeypatch.setattr(settings, "num_multiprocessors", lambda device: 132)
    shape = AttentionShape(torch.device(DEVICE), torch.bfloat16, 16, 2, 128, 256)
    plan, pieces = cut(shape, [context])
    assert (plan.settings.tile, plan.settings.merge) == (32, 8)
    assert pieces == {0: expected, 1: expected}


def cut(shape, contexts):
    """Plan decode rows; return the plan and each item's pieces in tiles, which must be adjacent."""
    rows, longest = len(contexts), max(contexts)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    tables = torch.zeros(rows, longest // 256 + 1, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
    metadata = AttentionMetadata(starts, lengths, tables, 1, longest, rows)
    plan = TritonAttention(shape, "a test").plan(metadata)[None].decode
    records = plan.records.view(-1, 8)[: plan.num_pieces].cpu().tolist()
    found = {item: [] for item in range(rows * shape.num_kv_heads)}
    for item, first, count, *_ in sorted(record for record in records if record[0] >= 0):
        assert first == sum(found[item])
        found[item].append(count)
    return plan, found


DTYPES = [torch.bfloat16] if INTERPRETING else [torch.bfloat16, torch.float16]
DECODES = [(1, 130), (1, 1), (1, 64), (1, 0), (1, 65)]
CHUNKS = [(5, 5), (3, 70), (1, 128), (0, 0), (70, 131)]


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_decode_rows(block_size, fp8, dtype):
    check(DECODES, dtype=dtype, fp8=fp8, block_size=block_size, order="HND" if fp8 else "NHD")


@on_device
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("block_size", [16, 64, 192])
def test_chunk_rows(block_size, fp8):
    check(CHUNKS, fp8=fp8, block_size=block_size, padding=3)


@on_device
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_mixed_step(order):
    dtype = torch.float16 if order == "HND" else torch.bfloat16
    check(DECODES + CHUNKS, order=order, dtype=dtype, padding=7, bounds=(256, 512))


@on_device
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_queries_that_lie_in_a_larger_tensor(order):
    case = step(DECODES, device=DEVICE, order=order)
    qkv = torch.full((len(DECODES), 9, 64), float("nan"), dtype=case.q.dtype, device=DEVICE)
    qkv[:, 2:6] = case.q
    assert_attends(attend(replace(case, q=qkv[:, 2:6])), case.expected())


@on_device
def test_e4m3_by_the_conversion_of_newer_cards(monkeypatch):
    """The interpreter converts as those cards do; on such a card this is the default."""
    monkeypatch.setattr(triton_backend, "converts_fp8", lambda q: True)
    check(DECODES, fp8=True)
    check([(1, 70), (1, 0)], fp8=True, head_dim=80, dtype=torch.float16)


@on_device
@pytest.mark.parametrize("rising", [True, False])
def test_rounds_of_merging(rising, monkeypatch):
    """Two partials at a time, with keys of rising or falling weights."""
    plain = settings.decode_settings

    def two_at_a_time(shape, num_rows):
        return replace(plain(shape, num_rows), merge=2)

    monkeypatch.setattr(settings, "decode_settings", two_at_a_time)
    monkeypatch.setattr(settings, "num_multiprocessors", lambda device: 132)
    case = step([(1, 700)], device=DEVICE)
    tokens = torch.arange(700)
    blocks = case.metadata.block_tables[0].cpu()[tokens // 64]
    size = (tokens if rising else 699 - tokens).float() / 100
    keys = case.q[0, ::2].cpu().float()[None] * size[:, None, None]
    case.kv.k[blocks, tokens % 64] = keys.to(case.kv.k.dtype).to(DEVICE)
    plan, pieces = cut(case.shape, [700])
    assert plan.settings.merge == 2
    assert min(map(len, pieces.values())) > 2
    assert_attends(attend(case), case.expected())


@on_device
@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
@pytest.mark.parametrize("fp8", [False, True])
def test_head_dims(head_dim, fp8):
    check([(1, 70), (1, 0), (9, 40)], head_dim=head_dim, fp8=fp8)


@on_device
@pytest.mark.parametrize("group", [1, 3, 7, 8, 16])
def test_groups(group):
    check([(1, 200), (1, 3), (6, 66)], heads=(2 * group, 2))


@on_device
def test_padding_rows_only():
    case = step([(1, 0), (1, 0)], device=DEVICE, bounds=(1, 256))
    assert not attend(case).any()


@on_device
def test_more_items_than_processors():
    check([(1, 17 * i) for i in range(12)] + [(20, 33)], heads=(2, 1), block_size=16)


@on_device
def test_many_pieces_of_one_row():
    check([(1, 64 * 9 + 1)], heads=(2, 1), bounds=(1, 4096))


@pytest.mark.skipif(INTERPRETING, reason="needs no kernel")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"head_dim": 72}, "head_dim is 72"),
        ({"num_q_heads": 34}, "query heads per kv head is 34"),
        ({"block_size": 48}, "block_size is 48"),
    ],
)
def test_refuses_what_it_cannot_do(change, words):
    plain = {
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "num_q_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 64,
        "block_size": 16,
    }
    with pytest.raises(ValueError, match=words):
        TritonAttention(AttentionShape(**(plain | change)), "a test")


on_card = pytest.mark.gpu
LONG = [(1, 3000), (1, 517), (300, 1300), (1000, 1000), (129, 4000), (17, 17), (1, 1), (2, 2049)]


@on_card
@pytest.mark.skipif(INTERPRETING, reason="too large for the interpreter")
@pytest.mark.parametrize("heads", [(16, 8), (14, 2), (9, 3), (64, 8), (2, 2)])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("block_size", [16, 64, 128, 192, 256])
def test_long_rows(block_size, fp8, heads):
    options = {"block_size": block_size, "fp8": fp8, "order": "HND" if fp8 else "NHD"}
    check(LONG, heads=heads, head_dim=128, padding=100, **options)


@on_card
@pytest.mark.skipif(INTERPRETING, reason="too large for the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_long_rows_of_other_heads(order, head_dim, dtype):
    check(LONG, heads=(8, 4), head_dim=head_dim, dtype=dtype, order=order, block_size=64)


@on_card
@pytest.mark.skipif(INTERPRETING, reason="too large for the interpreter")
def test_one_very_long_row_beside_many_short():
    check([(1, 60_000), *((1, 30 + i) for i in range(200))], heads=(4, 2), bounds=(1, 131_072))
    check([(1, 16), (700, 30_000)], heads=(4, 2), head_dim=128, bounds=(1024, 131_072))


@on_card
@pytest.mark.skipif(INTERPRETING, reason="graphs need a card")
def test_a_captured_step_reads_lengths_on_the_device():
    """One graph of a plan and two layers, replayed with other lengths, tables and padding."""
    rows = [(1, 900), (1, 1100), (1, 200), (200, 1200), (64, 64)]
    captured = step(rows, device=DEVICE, heads=(8, 4), head_dim=128, bounds=(512, 4096))
    backend = TritonAttention(captured.shape, "a test")

    def run():
        plan = backend.plan(captured.metadata)[None]
        arguments = captured.q, captured.kv, captured.metadata, plan, captured.spec
        return backend.attend(*arguments), backend.attend(*arguments)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = run()
    for seed, changed in enumerate(
        (rows, [(1, 2), (1, 1000), (1, 0), (3, 3), (60, 1100)], [(1, 0)] * 3 + [(0, 0)] * 2)
    ):
        used = sum(query for query, _ in changed)
        other = step(
            changed, device=DEVICE, heads=(8, 4), head_dim=128, seed=seed,
            padding=captured.q.shape[0] - used,
        )  # fmt: skip
        tables = other.metadata.block_tables
        assert other.kv.k.shape[0] <= captured.kv.k.shape[0]
        captured.metadata.block_tables[:, : tables.shape[1]].copy_(tables)
        captured.metadata.context_lens.copy_(other.metadata.context_lens)
        captured.metadata.query_start.copy_(other.metadata.query_start)
        captured.q.copy_(other.q)
        captured.kv.k[: other.kv.k.shape[0]].copy_(other.kv.k)
        captured.kv.v[: other.kv.v.shape[0]].copy_(other.kv.v)
        graph.replay()
        assert torch.equal(first, second)
        assert_attends(first, other.expected())


@on_card
@pytest.mark.skipif(INTERPRETING, reason="needs 9 GB")
def test_pool_beyond_31_bits():
    """Blocks at the end of a pool of more than 2**31 elements."""
    case = step([(1, 700), (40, 300)], device=DEVICE, heads=(4, 2), head_dim=128, block_size=256)
    count = case.kv.k.shape[0]
    layout = KVLayout(2**31 // (256 * 2 * 128) + count, 256, 2, 128, torch.bfloat16, "NHD")
    large = layout.allocate(DEVICE)
    shift = layout.num_blocks - count
    large.k[shift:].copy_(case.kv.k)
    large.v[shift:].copy_(case.kv.v)
    moved = replace(case.metadata, block_tables=case.metadata.block_tables + shift)
    assert_attends(attend(replace(case, kv=large, metadata=moved)), case.expected())
