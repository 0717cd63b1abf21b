"""Every version of the draw against its definition, on random rows of every kind."""

import random
from dataclasses import replace

import pytest
import torch
from draw_truth import assert_drawn
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels import SamplingTensors, reference
from nv_kernels.cpp import sample as cpp_sample
from nv_kernels.sampling import torch_draw

INF = float("inf")
BAD = {
    "nothing": lambda row: row.fill_(-INF),
    "nan": lambda row: row[len(row) // 2].fill_(float("nan")),
    "infinity": lambda row: row[-1].fill_(INF),
}
GOOD = {
    "plain": lambda row: row,
    "ties": lambda row: row.copy_((row * 2).round() / 2),
    "masked": lambda row: row[::3].fill_(-INF),
    "few": lambda row: row[5:].fill_(-INF),
    "peak": lambda row: row[7].fill_(60.0),
    "flat": lambda row: row.fill_(1.5),
}
TEMPERATURES = {
    "greedy": lambda draw: 0.0,
    "greedy with filters": lambda draw: 0.0,
    "unfiltered": lambda draw: draw.choice((0.0, 0.3, 1.0, 2.5)),
    "filtered": lambda draw: draw.choice((0.0, 0.7, 1.0, 1.0, 1.7, 1.7)),
}
UNFILTERED = ("greedy", "unfiltered")


def filters(draw):
    """Return a random top_k, top_p and min_p; each is off in some rows."""
    top_k = draw.choice((0, 0, 0, 2, 5, 50, 10**6))
    top_p = draw.choice((1.0, 1e-6, draw.uniform(0.05, 0.5), draw.uniform(0.5, 0.99)))
    return top_k, top_p, draw.choice((0.0, 0.0, draw.uniform(0.05, 0.7)))


def rows(kind, num_rows, vocabulary, dtype, seed, padding):
    """Make logits [R, V + padding], the rows' settings and their SamplingTensors.

    Ids in the padding are the likeliest, or their logits are NaN.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    logits = (torch.randn(num_rows, vocabulary + padding) * 1.5).to(dtype)
    for row in logits[:, :vocabulary]:
        (BAD | GOOD)[draw.choice([*GOOD, *GOOD, *GOOD, *BAD])](row)
    logits[:, vocabulary:] = 70.0
    logits[::2, vocabulary:] = float("nan")
    off = (0, 1.0, 0.0)
    settings = [
        (TEMPERATURES[kind](draw), *(off if kind in UNFILTERED else filters(draw)))
        for _ in range(num_rows)
    ]
    temperature, top_k, top_p, min_p = zip(*settings, strict=True)
    sampling = SamplingTensors(
        temperature=torch.tensor(temperature),
        top_k=torch.tensor(top_k, dtype=torch.int32),
        top_p=torch.tensor(top_p),
        min_p=torch.tensor(min_p),
        seeds=torch.randint(-(2**63), 2**63 - 1, (num_rows,)),
        positions=torch.randint(0, 2**33, (num_rows,)),
        any_filter=any(row[1:] != off for row in settings),
        num_ids=vocabulary if padding else None,
    )
    return logits, settings, sampling


def on(device, sampling):
    fields = {name: value.to(device) for name, value in vars(sampling).items()
              if isinstance(value, torch.Tensor)}  # fmt: skip
    return replace(sampling, **fields)


def check(version, kind, dtype, vocabulary, padding, sizes):
    """Compare a version with the definition on one batch of each size."""
    for seed, num_rows in enumerate(sizes):
        logits, settings, sampling = rows(kind, num_rows, vocabulary, dtype, seed, padding)
        tokens = version(logits.to(DEVICE), on(DEVICE, sampling))
        assert_drawn(logits, settings, tokens, sampling, most_different=1 + num_rows // 32)


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


@outer_only
@pytest.mark.parametrize("version", [torch_draw.sample, cpp_sample.sample], ids=["torch", "cpp"])
@pytest.mark.parametrize("kind", TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocabulary", "padding"), [(300, 0), (300, 57), (25003, 5)])
def test_on_a_cpu(monkeypatch, version, kind, dtype, vocabulary, padding):
    """The larger vocabulary is one in which top-k reads only a part."""
    monkeypatch.setitem(globals(), "DEVICE", "cpu")
    check(version, kind, dtype, vocabulary, padding, (*[1] * 20, 64))


@on_device
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from the interpreter's NumPy
@pytest.mark.parametrize("kind", TEMPERATURES)
@pytest.mark.parametrize(("dtype", "padding"), [(torch.float32, 57), (torch.bfloat16, 0)])
def test_in_triton(kind, dtype, padding):
    from nv_kernels.sampling import triton_sample  # noqa: PLC0415 - the outer process has none

    vocabulary = 300 if INTERPRETING else 25003
    check(triton_sample.sample, kind, dtype, vocabulary, padding, (1, 1, 64))


@outer_only
def test_the_rows_hold_every_kind():
    """Rows with and without a token, and rows whose token each filter changes."""
    logits, _, sampling = rows("filtered", 128, 300, torch.float32, 20, 0)
    tokens = reference.sample(logits, sampling)
    assert 5 < (tokens == -1).sum() < 60
    off = {
        "top_k": torch.zeros(128, dtype=torch.int32),
        "top_p": torch.ones(128),
        "min_p": torch.zeros(128),
    }
    for name, value in off.items():
        others = reference.sample(logits, replace(sampling, **{name: value}))
        assert (others != tokens).sum() > 3, name
