"""The flash_attn backend on a card, with the package that is installed there."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from attention_cases import assert_attends, step
from nv_kernels.attention.flash import FlashAttention

PACKAGES = ("flash_attn_interface", "flash_attn")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not any(importlib.util.find_spec(name) for name in PACKAGES),
        reason="no FlashAttention package is installed",
    ),
]
DECODES = [(1, 130), (1, 1), (1, 256), (1, 0), (1, 257), (1, 3000), (1, 16)]
CHUNKS = [(5, 5), (3, 300), (1, 128), (0, 0), (70, 131), (2, 0), (300, 1300), (1000, 1000), (1, 1)]
STALE = 30.0  # in slots that hold no token of the step: large, but finite as in the engine's pool


def build(rows, **options):
    case = step(rows, device="cuda", **({"block_size": 256, "head_dim": 128} | options))
    for part in (case.kv.k, case.kv.v):
        part.nan_to_num_(nan=STALE)
    return case


def attend(case):
    return case.attend(FlashAttention(case.shape, "a test"))


def check(rows, **options):
    case = build(rows, **options)
    assert_attends(attend(case), case.expected())


def needs_small_blocks(block_size):
    if block_size % 256 and not importlib.util.find_spec("flash_attn_interface"):
        pytest.skip("FlashAttention-2 takes blocks of a multiple of 256")


@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("rows", [DECODES, CHUNKS, DECODES + CHUNKS, [(1, 0)] * 3])
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_every_kind_of_step(rows, block_size, padding):
    needs_small_blocks(block_size)
    check(rows, block_size=block_size, padding=padding, bounds=(1024, 4096))


@pytest.mark.parametrize("heads", [(16, 8), (14, 2), (8, 8), (16, 1)])
def test_groups(heads):
    check(DECODES + CHUNKS, heads=heads)


@pytest.mark.parametrize(
    "features",
    [
        {"window": 1},
        {"window": 75},
        {"window": 1024},
        {"softcap": 0.7},
        {"window": 9, "softcap": 2},
    ],
    ids=str,
)
def test_a_window_and_a_softcap(features):
    case = build(DECODES + CHUNKS, bounds=(1024, 4096)).with_features(**features)
    backend = FlashAttention(case.shape, "a test")
    if refusal := backend.refusal(case.spec):
        pytest.skip(refusal)
    assert_attends(case.attend(backend), case.expected())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim, dtype):
    check(DECODES + CHUNKS, head_dim=head_dim, dtype=dtype, padding=1)


def test_one_very_long_row_beside_many_short():
    check([(1, 60_000), *((1, 30 + i) for i in range(200))], bounds=(1, 131_072))
    check([(1, 16), (700, 30_000)], bounds=(1024, 131_072))


def test_queries_that_are_a_view_of_more():
    case = build(DECODES + CHUNKS)
    wider = torch.cat([case.q, case.q], 1)[:, : case.q.shape[1]]
    assert_attends(attend(replace(case, q=wider)), case.expected())


@pytest.mark.parametrize("rows", [DECODES, DECODES + CHUNKS])
def test_a_captured_step_reads_lengths_on_the_device(rows):
    """One graph of a plan and two layers, replayed with other lengths, tables and padding."""
    captured = build(rows, bounds=(1024, 4096))
    backend = FlashAttention(captured.shape, "a test")

    def run():
        plan = backend.plan(captured.metadata)[None]
        arguments = captured.q, captured.kv, captured.metadata, plan, captured.spec
        return backend.attend(*arguments), backend.attend(*arguments)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = run()
    count = captured.metadata.num_decodes
    shorter = [(1, max(1, context // 2)) for _, context in rows[:count]]
    shorter += [(query // 2, context // 2) for query, context in rows[count:]]
    empty = [(1, 0)] * count + [(0, 0)] * (len(rows) - count)
    for seed, changed in enumerate((rows, shorter, empty)):
        used = sum(query for query, _ in changed)
        other = build(changed, seed=seed, padding=captured.q.shape[0] - used)
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
