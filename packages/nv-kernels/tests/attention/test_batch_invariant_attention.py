"""Batch-invariant attention on a card and in the interpreter: correct, and bitwise equal."""

from dataclasses import replace

import nv_kernels as nk
import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from attention_cases import FEATURES, assert_attends, step
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels.attention.metadata import AttentionShape
from nv_kernels.attention.triton import batch_invariant as batch_invariant_triton
from nv_kernels.attention.triton.batch_invariant import BatchInvariantTritonAttention
from nv_kernels.attention.triton.batch_invariant_kernel import (
    batch_invariant_attention_kernel,
    merge_splits_kernel,
)


def attend(case):
    return case.attend(BatchInvariantTritonAttention(case.shape, "a test"))


def check(rows, **options):
    case = step(rows, device=DEVICE, **options)
    if case.q.dtype == torch.float32:
        torch.testing.assert_close(attend(case), case.expected(), rtol=1e-5, atol=1e-6)
    else:
        assert_attends(attend(case), case.expected())


def as_other_step(case, rows):
    """The same sequences with other numbers of query tokens: (query_len, context_len).

    Row i must end where row i of the case ends, or earlier.
    """
    starts = case.metadata.query_start.tolist()
    lengths = case.metadata.context_lens.tolist()
    parts = []
    for index, (queries, context) in enumerate(rows):
        last = starts[index + 1] - (lengths[index] - context)
        parts.append(case.q[last - queries : last])
    queries = torch.tensor([0, *(row[0] for row in rows)]).cumsum(0)
    num_decodes = 0
    while num_decodes < len(rows) and rows[num_decodes][0] == 1:
        num_decodes += 1
    metadata = nk.AttentionMetadata(
        queries.to(torch.int32).to(DEVICE),
        torch.tensor([row[1] for row in rows], dtype=torch.int32, device=DEVICE),
        case.metadata.block_tables[: len(rows)],
        max(row[0] for row in rows),
        max(row[1] for row in rows),
        num_decodes,
    )
    return replace(case, q=torch.cat(parts), metadata=metadata), parts


def check_invariance(contexts, features=None, **options):
    """Assert that each token of each sequence has the same bits in several kinds of step."""
    whole = step([(context, context) for context in contexts], device=DEVICE, **options)
    whole = whole.with_features(**(features or {}))
    expected = attend(whole).split(contexts)
    torch.manual_seed(1)
    for trial in range(2 if INTERPRETING else 6):  # as chunks of any length, with cached context
        rows = []
        for context in contexts:
            end = int(torch.randint(1, context + 1, ()))
            rows.append((int(torch.randint(1, end + 1, ())), end))
        if trial == 0:
            rows = [(1, context) for context in contexts]  # as decodes
        case, _ = as_other_step(whole, rows)
        actual = attend(case).split([row[0] for row in rows])
        for got, want, (queries, end) in zip(actual, expected, rows, strict=True):
            assert torch.equal(got, want[end - queries : end]), (trial, queries, end)
    for index, context in enumerate(contexts):  # one row alone, whose splits are spread
        table = whole.metadata.block_tables[index : index + 1]
        first = sum(contexts[:index])
        for end in {1, (context + 1) // 2, context}:
            metadata = nk.AttentionMetadata(
                torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
                torch.tensor([end], dtype=torch.int32, device=DEVICE),
                table, 1, 4096, 1,
            )  # fmt: skip
            case = replace(whole, q=whole.q[first + end - 1 : first + end], metadata=metadata)
            assert torch.equal(attend(case)[0], expected[index][end - 1]), (index, end)


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


DECODES = [(1, 530), (1, 1), (1, 64), (1, 0), (1, 65)]
CHUNKS = [(5, 5), (3, 270), (1, 128), (0, 0), (70, 131)]
DTYPES = [torch.bfloat16, torch.float32]


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 64])
def test_mixed_step(block_size, dtype):
    check(DECODES + CHUNKS, block_size=block_size, dtype=dtype, padding=7)


@on_device
@pytest.mark.parametrize("block_size", [16, 128])
def test_fp8(block_size):
    check(DECODES + CHUNKS, block_size=block_size, fp8=True, order="HND", padding=3)


@on_device
@pytest.mark.parametrize(("head_dim", "heads"), [(80, (3, 1)), (128, (8, 1)), (256, (2, 2))])
def test_shapes(head_dim, heads):
    check([(1, 300), (1, 0), (9, 40)], head_dim=head_dim, heads=heads)


@on_device
def test_spread_or_not_is_the_same(monkeypatch):
    case = step([(1, 1500), (1, 255), (1, 256), (1, 257)], device=DEVICE, block_size=16)
    spread = attend(case)
    monkeypatch.setattr(batch_invariant_triton, "RESIDENT", 0)
    assert torch.equal(attend(case), spread)
    assert_attends(spread, case.expected())


@on_device
def test_padding_rows_only():
    case = step([(1, 0), (1, 0)], device=DEVICE, bounds=(1, 256))
    assert not attend(case).any()


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_step_does_not_matter(dtype):
    contexts = [300, 90, 1] if INTERPRETING else [1500, 300, 256, 90, 1, 700]
    check_invariance(contexts, dtype=dtype, heads=(3, 1))


@on_device
@pytest.mark.parametrize(
    ("features", "options"),
    [
        (FEATURES["all"] | {"window": 70}, {"heads": (3, 1), "block_size": 16}),
        ({"window": 265}, {"heads": (1, 1), "dtype": torch.float32}),
    ],
    ids=["all", "window"],
)
def test_the_step_does_not_matter_with_features(features, options):
    contexts = [290, 40] if INTERPRETING else [1500, 300, 256, 90, 1, 700]
    check_invariance(contexts, features, **options)


@on_device
def test_the_step_does_not_matter_in_fp8():
    contexts = [270, 33] if INTERPRETING else [1500, 300, 33, 1]
    check_invariance(contexts, fp8=True, order="HND", block_size=32)


on_card = pytest.mark.skipif(INTERPRETING, reason="too large for the interpreter")


@on_card
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(16, 8), (14, 2), (32, 8)])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("block_size", [16, 256])
def test_long_rows(block_size, fp8, heads):
    options = {"block_size": block_size, "fp8": fp8, "order": "HND" if fp8 else "NHD"}
    rows = [(1, 3000), (1, 517), (300, 1300), (1000, 1000), (129, 4000), (17, 17), (2, 2049)]
    check(rows, heads=heads, head_dim=128, padding=100, **options)
    check_invariance([3000, 517, 1300, 17], heads=heads, head_dim=128, **options)


@pytest.mark.skipif(INTERPRETING, reason="needs no kernel")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 72}, "head_dim is 72"),
        ({"num_q_heads": 34}, "query heads per kv head is 34"),
        ({"block_size": 48}, "block_size is 48"),
    ],
)
def test_refuses_what_it_cannot_do(change, words):
    plain = {
        "device": torch.device("cpu"), "dtype": torch.bfloat16, "num_q_heads": 2,
        "num_kv_heads": 1, "head_dim": 64, "block_size": 16,
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        BatchInvariantTritonAttention(AttentionShape(**(plain | change)), "a test")


# head_dim, group, block_size, dtype, fp8, capability, all features or none
COMPILED = [
    (128, 2, 256, torch.bfloat16, False, 80, False),
    (128, 2, 256, torch.bfloat16, False, 90, False),
    (128, 2, 256, torch.bfloat16, False, 100, False),
    (128, 8, 64, torch.bfloat16, True, 90, False),
    (64, 3, 16, torch.float16, False, 90, False),
    (256, 16, 64, torch.bfloat16, False, 90, False),
    (128, 2, 32, torch.float32, False, 90, False),
    (256, 1, 256, torch.float32, False, 90, False),
    (64, 8, 256, torch.bfloat16, False, 80, True),
    (64, 8, 256, torch.bfloat16, False, 90, True),
    (256, 2, 256, torch.bfloat16, False, 90, True),
    (128, 2, 64, torch.bfloat16, True, 90, True),
]


@pytest.mark.skipif(INTERPRETING, reason="compiles")
@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "dtype", "fp8", "capability", "has_features"), COMPILED
)
def test_compiles_ahead_of_time(head_dim, group, block_size, dtype, fp8, capability, has_features):
    shape = AttentionShape(torch.device("cpu"), dtype, 8 * group, 8, head_dim, block_size)
    tiles = BatchInvariantTritonAttention(shape, "a test").tiles
    kind = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    width, stored = (head_dim // 2, "*i16") if fp8 else (head_dim, kind)
    types = {
        "q_ptr": kind, "k_ptr": stored, "v_ptr": stored, "out_ptr": kind,
        "block_tables_ptr": "*i32", "context_lens_ptr": "*i32", "records_ptr": "*i32",
        "partials_ptr": "*fp32", "sums_ptr": "*fp32", "qk_scale": "fp32", "v_scale": "fp32",
    }  # fmt: skip
    if has_features:
        types["sinks_ptr"] = kind
    pointers = [name for name, type_ in types.items() if type_.startswith("*")]
    counts = ("table_stride", "num_decodes", "width", "max_splits", "num_records", "num_tokens")
    shared = {
        "GROUP": group, "HEAD_DIM": head_dim, "DIM": max(64, 1 << (head_dim - 1).bit_length()),
        "SPLIT": tiles.split, "PDL": capability >= 90, "WINDOW": 128 if has_features else 0,
    }  # fmt: skip
    if not has_features:
        shared["sinks_ptr"] = None
    constants = shared | {
        "BLOCK_SIZE": block_size, "BLOCK_M": tiles.rows, "TILE": tiles.keys, "STAGES": tiles.stages,
        "Q_TOKEN": 8 * group * head_dim, "Q_HEAD": head_dim, "KV_BLOCK": block_size * 8 * width,
        "KV_TOKEN": 8 * width, "KV_HEAD": width, "FP8": fp8,
        "SOFTCAP": 50.0 if has_features else 0.0,
    }  # fmt: skip
    kernel = compile_for(
        batch_invariant_attention_kernel, types | dict.fromkeys(counts, "i32"), constants,
        capability, pointers, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    assert_fits(kernel, capability)
    if dtype != torch.float32 and capability == 90:
        assert "wgmma" in kernel.ptx
    kept = ("context_lens_ptr", "partials_ptr", "sums_ptr", "sinks_ptr")
    types = {name: types[name] for name in kept if name in types}
    types |= {"out_ptr": kind, "num_decodes": "i32", "max_splits": "i32", "v_scale": "fp32"}
    assert_fits(
        compile_for(merge_splits_kernel, types, shared, capability, num_warps=4), capability
    )
