"""A window, a softcap and sinks: the definition, and the backends of a CPU against it."""

import itertools
from dataclasses import replace

import nv_kernels as nk
import pytest
import torch
from attention_cases import FEATURES, assert_attends, step
from nv_kernels.attention.batch_invariant_torch import BatchInvariantTorchAttention
from nv_kernels.attention.cpp import CPUAttention
from nv_kernels.attention.torch import TorchAttention
from nv_kernels.cpp.library import find_compiler

COMPILED = pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
BACKENDS = [
    TorchAttention,
    BatchInvariantTorchAttention,
    pytest.param(CPUAttention, marks=COMPILED),
]

ROWS = [(1, 1), (1, 0), (1, 40), (1, 90), (1, 17), (5, 5), (40, 75), (300, 310), (0, 0), (3, 64)]


def case_for(backend, rows, **options):
    """A step on the CPU in the backend's own layout."""
    order = "NHD" if backend is TorchAttention else "HND"
    return step(rows, device="cpu", head_dim=32, block_size=16, order=order, **options)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_the_definition_is_a_sum_over_the_keys_of_the_window(features):
    """Plain float64 sums over contiguous keys, one row and head at a time."""
    case = step([(30, 50)], device="cpu", heads=(2, 1), head_dim=16, block_size=16)
    case = replace(case, q=case.q.double()).with_features(**features)
    blocks = case.metadata.block_tables[0, :4].long()
    k, v = (cache[blocks].flatten(0, 1)[:50, 0].double() for cache in (case.kv.k, case.kv.v))
    out = case.expected()
    for row, head in itertools.product(range(30), range(2)):
        seen = slice(max(0, 21 + row - (case.spec.window or 50)), 21 + row)
        scores = k[seen] @ case.q[row, head] * case.spec.scale
        if case.spec.softcap:
            scores = case.spec.softcap * torch.tanh(scores / case.spec.softcap)
        weights = torch.exp(scores)
        total = weights.sum() + (torch.exp(case.sinks[head]) if case.spec.sinks else 0)
        torch.testing.assert_close(out[row, head], weights @ v[seen] / total)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((3, 3), torch.float32), ((4, 2), torch.bfloat16), ((6, 2), torch.float32)],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_of_all_kinds_of_rows(backend, dtype, heads, features):
    case = case_for(backend, ROWS, heads=heads, dtype=dtype, padding=3)
    case = case.with_features(**features)
    made = backend(case.shape, "a test")
    assert made.refusal(case.spec) is None
    assert_attends(case.attend(made), case.expected())


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_fp8_cache(backend):
    case = case_for(backend, [(1, 40), (1, 90), (40, 75)], fp8=True)
    case = case.with_features(**FEATURES["all"])
    assert_attends(case.attend(backend(case.shape, "a test")), case.expected())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_never_reads_the_keys_before_it(backend):
    case = case_for(backend, [(1, 200), (1, 140), (1, 137), (20, 185)]).with_features(window=33)
    expected = case.expected()
    case.forget_unread()
    assert_attends(case.attend(backend(case.shape, "a test")), expected)


@pytest.mark.parametrize("features", ["window inside a tile", "window over tiles", "all"])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_token_s_bits_do_not_depend_on_the_step(backend, features):
    contexts = [300, 170]
    rows = [(context, context) for context in contexts]
    case = case_for(backend, rows, heads=(6, 2), dtype=torch.float32)
    case = case.with_features(**FEATURES[features])
    made = backend(case.shape, "a test")
    queries = case.q.split(contexts)
    prompts = case.attend(made).split(contexts)
    for chunks in [(1, 300), (1, 170)], [(1, 77), (90, 161)], [(40, 200), (0, 0)], [(9, 9), (1, 1)]:
        parts = [q[end - size : end] for q, (size, end) in zip(queries, chunks, strict=True)]
        expected = [out[end - size : end] for out, (size, end) in zip(prompts, chunks, strict=True)]
        starts = torch.tensor([0, chunks[0][0], len(torch.cat(parts))], dtype=torch.int32)
        lengths = torch.tensor([end for _, end in chunks], dtype=torch.int32)
        step_of_chunks = nk.AttentionMetadata(
            starts, lengths, case.metadata.block_tables, 300, 300, 0
        )
        out = replace(case, q=torch.cat(parts), metadata=step_of_chunks).attend(made)
        assert torch.equal(out, torch.cat(expected))


def test_a_spec_names_its_features_and_refuses_what_has_no_meaning():
    assert nk.AttentionSpec(1.0).features == ()
    assert nk.AttentionSpec(1.0, 4, 2.0, sinks=True).features == ("window", "softcap", "sinks")
    with pytest.raises(ValueError, match="window is 0: it must be at least 1"):
        nk.AttentionSpec(1.0, window=0)
    with pytest.raises(ValueError, match=r"softcap is 0.0: it must be positive"):
        nk.AttentionSpec(1.0, softcap=0.0)
