"""Top-p's bound: it accepts only tokens of the nucleus, and saves passes."""

import pytest
import torch
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels import SamplingTensors
from nv_kernels.sampling import triton_filtering as filtering
from nv_kernels.sampling import triton_sample as sampling

ROWS = 4 if INTERPRETING else 64
TILES = 70 if INTERPRETING else 1187
KINDS = ("flat", "normal", "peaked")


def some_logits(kind, rows=ROWS, dtype=torch.bfloat16):
    """flat: every tile has logits above any token. peaked: one token per tile has all its mass."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(rows, TILES * sampling.TILE, generator=generator)
    logits *= {"flat": 0.01, "normal": 2.5, "peaked": 1.0}[kind]
    if kind == "peaked":
        logits[:, torch.arange(logits.shape[1]) % sampling.TILE != 77] = -60.0
    return logits.to(dtype).to(DEVICE)


def params(top_p, top_k=0, min_p=0.0, seed=11):
    rows = len(top_p)
    return SamplingTensors(
        temperature=torch.ones(rows, device=DEVICE),
        top_k=torch.full((rows,), top_k, dtype=torch.int32, device=DEVICE),
        top_p=top_p.float().to(DEVICE),
        min_p=torch.full((rows,), min_p, device=DEVICE),
        seeds=torch.arange(rows, device=DEVICE) + seed,
        positions=torch.arange(rows, device=DEVICE) * 3,
        any_filter=True,
    )


def first_draw(logits, **filters):
    """Return the token that each row draws first, and the share of the mass strictly above it."""
    rows = len(logits)
    tokens = sampling.sample(logits, params(torch.ones(rows), **filters))
    values = logits.double()
    mass = values.softmax(-1)
    if filters.get("top_k"):
        kth = values.topk(filters["top_k"]).values[:, -1:]
        mass = torch.where(values >= kth, mass, 0.0)
    mass = torch.where(mass >= filters.get("min_p", 0.0) * mass.amax(-1, keepdim=True), mass, 0.0)
    above = torch.where(values > values.gather(1, tokens[:, None]), mass, 0.0)
    return tokens, above.sum(-1) / mass.sum(-1)


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


@on_device
@pytest.mark.parametrize(
    ("kind", "filters"),
    [*((kind, {}) for kind in KINDS), ("normal", {"top_k": 300}), ("normal", {"min_p": 0.02})],
)
def test_a_token_is_kept_where_the_mass_above_is_under_p(kind, filters):
    """p just above and just below that share, and on both sides of the bound's error."""
    logits = some_logits(kind)
    first, share = first_draw(logits, **filters)
    for factor in (0.9, 1 - 2e-5, 1 + 2e-5, 1.0015):
        top_p = (share * factor).clamp(1e-6, 0.9999)
        tokens = sampling.sample(logits, params(top_p, **filters))
        assert torch.equal(tokens == first, share < top_p), (factor, tokens, first)
        drawn = [logits.gather(1, ids[:, None])[:, 0] for ids in (tokens, first)]
        assert (drawn[0] >= drawn[1]).all()


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_largest_logit_is_always_kept(dtype):
    logits = some_logits("normal", dtype=dtype)
    logits[:, 1234] = 40.0  # what each row draws
    logits[1, [77, 5000]] = 40.0  # not alone
    for top_p in (1e-6, 0.5):
        tokens = sampling.sample(logits, params(torch.full((ROWS,), top_p)))
        assert (logits.gather(1, tokens[:, None]) == 40.0).all()


@on_device
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from the interpreter's NumPy
@pytest.mark.parametrize("filters", [{"top_k": 5}, {"min_p": 0.1}])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf")])
def test_a_row_without_mass_ends(bad, filters):
    """No draw from a row without mass is accepted: the row gets -1."""
    logits = some_logits("normal", rows=2)
    logits[0, 300:] = bad
    tokens = sampling.sample(logits, params(torch.full((2,), 0.9), **filters))
    if bad < 0:
        assert 0 <= tokens[0] < 300
        logits[0] = bad
        tokens = sampling.sample(logits, params(torch.full((2,), 0.9), **filters))
    assert tokens[0] == -1


@pytest.mark.skipif(not INTERPRETING, reason="counts in the interpreter")
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_is_made_where_the_bound_does_not_decide(kind, monkeypatch):
    """Passes in parts of two tiles: all of them if p is near the share, few or none if not."""
    parts = []
    write = filtering._write_masses

    def counted(*arguments):
        parts.append(arguments)
        return write(*arguments)

    monkeypatch.setattr(filtering, "_write_masses", counted)
    monkeypatch.setattr(sampling, "SPAN", 2)
    logits = some_logits(kind, rows=1)
    first, share = first_draw(logits, seed=6)
    reached = int((logits.view(TILES, -1).amax(-1) > logits[0, first]).sum())
    whole = -(-reached // 2)
    counts = []
    for factor in (1.0005, 1.1):
        parts.clear()
        tokens = sampling.sample(logits, params(share * factor, seed=6))
        assert torch.equal(tokens, first)
        counts.append(len(parts))
    assert whole > 4
    assert counts[0] == whole
    if kind == "peaked":  # the bound is the mass itself
        assert counts[1] == 0
    else:
        assert 0 < counts[1] < whole
