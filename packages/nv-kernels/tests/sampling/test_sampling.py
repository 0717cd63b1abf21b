"""The draw: its distribution, its filters, its independence of other rows."""

import itertools
from dataclasses import replace

import nv_kernels as nk
import pytest
import torch
from nv_kernels.sampling import torch_draw
from nv_kernels.sampling.philox import uniform, uniforms

NAMES = ("temperature", "top_k", "top_p", "min_p")
VERSIONS = {"definition": nk.reference.sample, "torch": torch_draw.sample, "cpu": nk.sample}
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture(autouse=True, params=VERSIONS)
def version(request, monkeypatch):
    """Run each test with each version as `nk.sample`."""
    monkeypatch.setattr(nk, "sample", VERSIONS[request.param])
    return request.param


def tensors(rows, *, seeds=None, positions=None):
    """Make SamplingTensors of rows; each is a dict of the parameters that are not off."""
    rows = [OFF | row for row in rows]
    dtypes = {"top_k": torch.int32}
    columns = {
        name: torch.tensor([row[name] for row in rows], dtype=dtypes.get(name, torch.float32))
        for name in NAMES
    }
    count = torch.arange(len(rows))
    return nk.SamplingTensors(
        **columns,
        seeds=count if seeds is None else seeds,
        positions=count if positions is None else positions,
        any_filter=any(row[name] != OFF[name] for row in rows for name in NAMES[1:]),
    )


def many(logits, count, **row):
    """Draw count times from one row of logits."""
    sampling = tensors([row])
    fields = {name: getattr(sampling, name).expand(count) for name in NAMES}
    keys = {"seeds": torch.arange(count) * 2654435761 - 2**62, "positions": torch.arange(count)}
    sampling = nk.SamplingTensors(**fields, **keys, any_filter=sampling.any_filter)
    return nk.sample(logits.expand(count, -1), sampling)


def exact(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities by sorting, in float64."""
    weights = (logits.double() / temperature).softmax(-1)
    kept = weights >= min_p * weights.max()
    if top_k:
        kept &= logits >= logits.sort(descending=True).values[min(top_k, len(logits)) - 1]
    weights = torch.where(kept, weights, 0.0)
    values, place = logits.unique(return_inverse=True)
    mass = torch.zeros(len(values), dtype=torch.float64).index_add(0, place, weights)
    above = (mass.flip(0).cumsum(0).flip(0) - mass)[place]
    weights = torch.where(above < top_p * weights.sum(), weights, 0.0)
    return weights / weights.sum()


def chi_square_limit(degrees):
    """The 99.9 % point of chi-square, by Wilson and Hilferty."""
    return degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "row",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.5},
        {"top_k": 5},
        {"top_k": 1000},
        {"top_p": 0.8},
        {"top_p": 0.3, "temperature": 1.7},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.7, "min_p": 0.05, "temperature": 1.3},
        {"top_k": 3, "top_p": 0.999},
    ],
    ids=str,
)
def test_distribution(row, dtype):
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(40, generator=generator) * 2).to(dtype)
    logits[7] = logits[3]  # ties
    logits[20:23] = float("-inf")
    count = 20000
    expected = exact(logits.float(), **row) * count
    observed = torch.bincount(many(logits, count, **row), minlength=40)
    support = expected > 0
    assert not observed[~support].any()
    common = expected >= 5
    rare = support & ~common
    statistic = ((observed - expected) ** 2 / expected)[common].sum()
    degrees = int(common.sum()) - 1
    if expected[rare].sum() >= 5:
        statistic += (observed[rare].sum() - expected[rare].sum()) ** 2 / expected[rare].sum()
        degrees += 1
    assert statistic < chi_square_limit(degrees)


def test_published_top_p_case():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert many(logits, 3000, top_p=0.6).unique().tolist() == [2, 3]
    assert many(logits, 1000, top_p=1e-9).unique().tolist() == [3]


def test_top_k_keeps_ties_with_the_kth():
    logits = torch.tensor([0.0, 1.0, 2.0, 1.0, 1.0])
    assert many(logits, 1000, top_k=2).unique().tolist() == [1, 2, 3, 4]
    assert many(logits, 1000, top_k=1).unique().tolist() == [2]


@pytest.mark.parametrize("row", [{"top_k": 1}, {"top_k": 9}, {"top_k": 9, "top_p": 0.7}], ids=str)
@pytest.mark.parametrize("coarse", [False, True])
def test_top_k_of_a_large_vocabulary(row, coarse, version):
    """The same support as a sort's, in a vocabulary of many tiles, all logits negative."""
    torch.manual_seed(0)
    logits = torch.randn(25003) - 9
    if coarse:  # ties by the hundred
        logits = logits.round()
    support = torch.nonzero(exact(logits, **row)).flatten()
    count = 400 if version == "definition" else 4000  # it sorts every row
    drawn = many(logits, count if not coarse else 40, **row).unique()
    assert set(drawn.tolist()) <= set(support.tolist())
    assert coarse or drawn.numel() == support.numel()


def test_top_p_keeps_ties_with_the_last():
    logits = torch.tensor([0.0, 1.0, 2.0, 1.0, 1.0])
    assert many(logits, 1000, top_p=0.5).unique().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("top_p", [1e-38, 1e-45, 1e-46])  # fp32 rounds the last one to 0
@pytest.mark.parametrize("more", [{}, {"top_k": 9}, {"min_p": 0.1}], ids=str)
def test_n02_a_tiny_top_p_keeps_the_most_likely_token(monkeypatch, top_p, more):
    rounds = itertools.count()

    def bounded(*args):
        assert next(rounds) < 100, "the draw does not end"
        return uniforms(*args)

    for module in ("philox", "torch_draw"):  # the definition's `uniform` is in the first
        monkeypatch.setattr(f"nv_kernels.sampling.{module}.uniforms", bounded)
    logits = torch.linspace(-3, 3, 40)[
        torch.randperm(40, generator=torch.Generator().manual_seed(0))
    ]
    assert many(logits, 300, top_p=top_p, **more).unique().tolist() == [logits.argmax()]


def test_greedy_takes_the_lowest_of_ties():
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [7.0, 7.0, 7.0, 7.0], [0.0, 1.0, 2.0, 3.0]])
    greedy = tensors([{"temperature": 0.0}] * 3)
    assert nk.sample(logits, greedy).tolist() == [1, 0, 3]
    mixed = tensors([{"temperature": 0.0, "top_k": 2}, {"temperature": 0.0}, {"top_p": 0.1}])
    assert nk.sample(logits, mixed).tolist() == [1, 0, 3]


def test_inversion_takes_the_first_id_whose_mass_exceeds_u():
    logits = torch.zeros(500, 8)
    sampling = tensors([{}] * 500)
    u = uniform(sampling.seeds, sampling.positions, 0)
    assert torch.equal(nk.sample(logits, sampling), (u * 8).floor().long())


ROWS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.02, "temperature": 1.5},
    {"top_k": 50, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 0.0, "top_p": 0.5},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1003, 40000])
def test_a_draw_does_not_depend_on_other_rows(vocabulary, dtype):
    """A row alone, in a batch, among other rows and at another place draws the same token."""
    torch.manual_seed(0)
    rows = ROWS * 8
    logits = (torch.randn(len(rows), vocabulary) * 3).to(dtype)
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(rows),))
    positions = torch.randint(0, 5000, (len(rows),))
    batch = nk.sample(logits, tensors(rows, seeds=seeds, positions=positions))
    for chosen in [[row] for row in range(len(rows))] + [list(range(63, 20, -3))]:
        some = tensors(
            [rows[row] for row in chosen], seeds=seeds[chosen], positions=positions[chosen]
        )
        assert torch.equal(nk.sample(logits[chosen], some), batch[chosen])


def test_position_and_seed_change_the_draw():
    logits = torch.zeros(1, 100000)
    one = [nk.sample(logits, tensors([{}], positions=torch.tensor([p]))).item() for p in range(9)]
    two = [nk.sample(logits, tensors([{}], seeds=torch.tensor([s]))).item() for s in range(9)]
    assert len(set(one)) == len(set(two)) == 9


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_masked_tokens_are_never_drawn(row):
    logits = torch.full((200,), float("-inf"))
    logits[[13, 101, 199]] = torch.tensor([0.0, 1.0, 0.5])
    assert set(many(logits, 300, **row).tolist()) <= {13, 101, 199}
    logits[[13, 101]] = float("-inf")
    assert many(logits, 20, **row).unique().tolist() == [199]


BROKEN = {
    "nothing": lambda row: row.fill_(float("-inf")),
    "nan": lambda row: row[row.argmin()].fill_(float("nan")),
    "all nan": lambda row: row.fill_(float("nan")),
    "infinity": lambda row: row[-1].fill_(float("inf")),
    "infinities": lambda row: row[:2].copy_(torch.tensor([float("inf"), float("-inf")])),
    "nan and infinity": lambda row: row[:2].copy_(torch.tensor([float("nan"), float("inf")])),
}


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("vocabulary", [3, 40000])  # top-k reads only a part of the second
@pytest.mark.parametrize("mixed", [False, True])
def test_a_row_without_a_token_to_draw_gets_minus_1_and_changes_no_other_row(
    row, broken, vocabulary, mixed
):
    logits = torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(3))
    BROKEN[broken](logits[0])
    rows = [row, row, {"temperature": 0.5, "top_p": 0.9}] if mixed else [row, row]
    drawn = nk.sample(logits[[0, 1, 1][: len(rows)]], tensors(rows))
    alone = tensors([row], seeds=torch.tensor([1]), positions=torch.tensor([1]))
    assert drawn[0] == -1
    assert drawn[1] == nk.sample(logits[1:], alone)[0]


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("vocabulary", [130, 40000])
def test_ids_past_the_bound_are_never_drawn(row, vocabulary):
    """Even if they are the likeliest, and even if their logits are NaN."""
    torch.manual_seed(0)
    logits = torch.randn(20, vocabulary + 300)
    logits[:, vocabulary:] += 30
    logits[:5, vocabulary + 7] = float("nan")
    rows = tensors([row] * 20)
    bounded = nk.sample(logits, replace(rows, num_ids=vocabulary))
    assert torch.equal(bounded, nk.sample(logits[:, :vocabulary].contiguous(), rows))


def test_top_p_drops_a_token_whose_mass_above_is_the_limit_itself():
    """Four logits in order whose exponentials are equal in fp32: each has mass 1/4 exactly."""
    logits = torch.tensor([0.0, -1e-9, -2e-9, -3e-9])
    assert many(logits, 300, top_p=0.5).unique().tolist() == [0, 1]
    assert many(logits, 300, top_p=0.75).unique().tolist() == [0, 1, 2]


def test_min_p_keeps_a_token_at_the_bound_itself():
    logits = torch.stack([torch.tensor(0.0), torch.tensor(0.25).log()])
    assert many(logits, 300, min_p=0.25).unique().tolist() == [0, 1]


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e30])
def test_extreme_temperatures(temperature):
    logits = torch.tensor([-80.0, 90.0, 89.5])
    drawn = many(logits, 300, temperature=temperature).unique().tolist()
    assert drawn == ([0, 1, 2] if temperature > 1 else [1])


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_no_rows_and_one_token(row):
    assert nk.sample(torch.empty(0, 5), tensors([])).shape == (0,)
    assert nk.sample(torch.tensor([[-4.0]]), tensors([row])).tolist() == [0]
