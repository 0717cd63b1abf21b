"""A window, a softcap and sinks: the definition, and the backends of a CPU against it."""

import itertools
from dataclasses import replace

import nv_kernels as nk
import pytest
import torch
from attention_cases import assert_attends, step
from nv_kernels.attention.torch import TorchAttention

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
@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (6, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [TorchAttention])
def test_a_step_of_all_kinds_of_rows(backend, dtype, heads, features):
    options = {"heads": heads, "head_dim": 32, "block_size": 16, "dtype": dtype, "padding": 3}
    case, sinks = with_features(step(ROWS, device="cpu", **options), **features)
    made = backend(case.shape, "a test")
    assert made.refusal(case.spec) is None
    assert_attends(attend(made, case, sinks), expected(case, sinks))


@pytest.mark.parametrize("backend", [TorchAttention])
def test_an_fp8_cache(backend):
    case = step([(1, 40), (1, 90), (40, 75)], device="cpu", head_dim=32, block_size=16, fp8=True)
    case, sinks = with_features(case, **SPECS["all"])
    assert_attends(attend(backend(case.shape, "a test"), case, sinks), expected(case, sinks))


@pytest.mark.parametrize("backend", [TorchAttention])
def test_a_window_never_reads_the_keys_before_it(backend):
    """Blocks before the windows of all rows hold NaN."""
    case = step([(1, 200), (1, 140), (20, 180)], device="cpu", head_dim=32, block_size=16)
    for row, (query_len, context_len) in enumerate([(1, 200), (1, 140), (20, 180)]):
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


def test_a_spec_names_its_features_and_refuses_what_has_no_meaning():
    assert nk.AttentionSpec(1.0).features == ()
    assert nk.AttentionSpec(1.0, 4, 2.0, sinks=True).features == ("window", "softcap", "sinks")
    with pytest.raises(ValueError, match="window is 0: it must be at least 1"):
        nk.AttentionSpec(1.0, window=0)
    with pytest.raises(ValueError, match=r"softcap is 0.0: it must be positive"):
        nk.AttentionSpec(1.0, softcap=0.0)
