"""A window, a softcap and sinks: the definition, and the backends of a CPU against it."""

import itertools
from dataclasses import replace

import nv_kernels as nk
import pytest
import torch
from attention_cases import assert_attends, step
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

SPECS = {
    "window of 1": {"window": 1},
    "window inside a block": {"window": 5},
    "window of a block": {"window": 16},
    "window over blocks": {"window": 37},
    "window past every context": {"window": 1000},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": True},
    "all": {"window": 19, "softcap": 1.3, "sinks": True},
}
ROWS = [(1, 1), (1, 0), (1, 40), (1, 90), (1, 17), (5, 5), (40, 75), (300, 310), (0, 0), (3, 64)]


def case_for(backend, rows, **options):
    """A step on the CPU in the backend's own layout."""
    order = "NHD" if backend is TorchAttention else "HND"
    return step(rows, device="cpu", head_dim=32, block_size=16, order=order, **options)


def with_features(case, **features):
    """The step with a layer of these features, and its sinks."""
    spec = replace(case.spec, **features)
    heads = torch.arange(case.q.shape[1], device=case.q.device)
    sinks = (1.5 - heads % 4).to(case.q.dtype) if spec.sinks else None
    return replace(case, spec=spec), sinks


def attend(backend, case, sinks):
    plan = backend.plan(case.metadata, case.spec.window)
    return backend.attend(case.q, case.kv, case.metadata, plan, case.spec, sinks=sinks)


def expected(case, sinks):
    return nk.reference.attention(case.q, case.kv, case.metadata, case.spec, sinks)


@pytest.mark.parametrize("features", SPECS.values(), ids=SPECS)
def test_the_definition_is_a_sum_over_the_keys_of_the_window(features):
    """Plain float64 sums over contiguous keys, one row and head at a time."""
    case = step([(30, 50)], device="cpu", heads=(2, 1), head_dim=16, block_size=16)
    case, sinks = with_features(replace(case, q=case.q.double()), **features)
    blocks = case.metadata.block_tables[0, :4].long()
    k, v = (cache[blocks].flatten(0, 1)[:50, 0].double() for cache in (case.kv.k, case.kv.v))
    out = expected(case, sinks)
    for row, head in itertools.product(range(30), range(2)):
        seen = slice(max(0, 21 + row - (case.spec.window or 50)), 21 + row)
        scores = k[seen] @ case.q[row, head] * case.spec.scale
        if case.spec.softcap:
            scores = case.spec.softcap * torch.tanh(scores / case.spec.softcap)
        weights = torch.exp(scores)
        total = weights.sum() + (torch.exp(sinks[head]) if case.spec.sinks else 0)
        torch.testing.assert_close(out[row, head], weights @ v[seen] / total)


@pytest.mark.parametrize("features", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((3, 3), torch.float32), ((4, 2), torch.bfloat16), ((6, 2), torch.float32)],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_of_all_kinds_of_rows(backend, dtype, heads, features):
    case = case_for(backend, ROWS, heads=heads, dtype=dtype, padding=3)
    case, sinks = with_features(case, **features)
    made = backend(case.shape, "a test")
    assert made.refusal(case.spec) is None
    assert_attends(attend(made, case, sinks), expected(case, sinks))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_fp8_cache(backend):
    case = case_for(backend, [(1, 40), (1, 90), (40, 75)], fp8=True)
    case, sinks = with_features(case, **SPECS["all"])
    assert_attends(attend(backend(case.shape, "a test"), case, sinks), expected(case, sinks))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_never_reads_the_keys_before_it(backend):
    """Blocks before the windows of all rows hold NaN."""
    rows = [(1, 200), (1, 140), (20, 180)]
    case = case_for(backend, rows)
    for row, (query_len, context_len) in enumerate(rows):
        gone = (context_len - query_len + 1 - 33) // 16
        for cache in (case.kv.k, case.kv.v):
            cache[case.metadata.block_tables[row, :gone].long()] = float("nan")
    case.metadata.block_tables[0, :10] = 10**6  # not a block
    case, sinks = with_features(case, window=33)
    out = attend(backend(case.shape, "a test"), case, sinks)
    case.metadata.block_tables[0, :10] = 0
    for cache in (case.kv.k, case.kv.v):
        cache.nan_to_num_(0.0)
    assert_attends(out, expected(case, sinks))


@pytest.mark.parametrize("features", ["window inside a block", "window over blocks", "all"])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_token_s_bits_do_not_depend_on_the_step(backend, features):
    contexts = [300, 170]
    rows = [(context, context) for context in contexts]
    case = case_for(backend, rows, heads=(6, 2), dtype=torch.float32)
    case, sinks = with_features(case, **SPECS[features])
    made = backend(case.shape, "a test")
    queries = case.q.split(contexts)
    prompts = attend(made, case, sinks).split(contexts)
    for chunks in [(1, 300), (1, 170)], [(1, 77), (90, 161)], [(40, 200), (0, 0)], [(9, 9), (1, 1)]:
        parts = [q[end - size : end] for q, (size, end) in zip(queries, chunks, strict=True)]
        expected = [out[end - size : end] for out, (size, end) in zip(prompts, chunks, strict=True)]
        starts = torch.tensor([0, chunks[0][0], len(torch.cat(parts))], dtype=torch.int32)
        lengths = torch.tensor([end for _, end in chunks], dtype=torch.int32)
        step_of_chunks = nk.AttentionMetadata(
            starts, lengths, case.metadata.block_tables, 300, 300, 0
        )
        out = attend(made, replace(case, q=torch.cat(parts), metadata=step_of_chunks), sinks)
        assert torch.equal(out, torch.cat(expected))


def test_a_spec_names_its_features_and_refuses_what_has_no_meaning():
    assert nk.AttentionSpec(1.0).features == ()
    assert nk.AttentionSpec(1.0, 4, 2.0, sinks=True).features == ("window", "softcap", "sinks")
    with pytest.raises(ValueError, match="window is 0: it must be at least 1"):
        nk.AttentionSpec(1.0, window=0)
    with pytest.raises(ValueError, match=r"softcap is 0.0: it must be positive"):
        nk.AttentionSpec(1.0, softcap=0.0)
