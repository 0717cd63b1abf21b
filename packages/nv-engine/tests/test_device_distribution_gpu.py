"""A card's draws have the distribution that is asked for: chi-square tests on fixed seeds.

Marked gpu. Draws go through the engine's sampler: tables, flags, `nk.sample`. The truth is computed
in float64 from the same logits by definitions of a few lines. Each case also names neighbours of
its parameters, and the test has the power to tell them apart: the same draws are refused as a
sample of theirs.
"""

import pytest
import torch
from control_cases import decoding_rows
from nv_engine.batch import Admission, Batch, Chunk
from nv_engine.device.draw_head import sample
from nv_engine.device.ring import ResultRing
from nv_engine.device.sampling_tables import SamplingTables
from nv_engine.device.slots import Slots
from nv_engine.params import SamplingParams

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
NUM_ROWS, NUM_STEPS = 256, 100  # 25,600 draws
CASES = {
    "temperature 1": ({"temperature": 1.0}, [{"temperature": 0.9}, {"temperature": 1.1}]),
    "temperature 0.6": ({"temperature": 0.6}, [{"temperature": 0.55}, {"temperature": 0.66}]),
    "temperature 2.5": ({"temperature": 2.5}, [{"temperature": 2.1}, {"temperature": 3.0}]),
    "top_k 1": ({"top_k": 1}, [{"top_k": 2}]),
    "top_k 7": ({"top_k": 7}, [{"top_k": 6}, {"top_k": 8}]),
    "top_k hot": (
        {"top_k": 9, "temperature": 2.0},
        [{"top_k": 9}, {"top_k": 10, "temperature": 2.0}],
    ),
    "top_p": ({"top_p": 0.8}, [{"top_p": 0.75}, {"top_p": 0.85}]),
    "top_p small": ({"top_p": 0.3}, [{"top_p": 0.2}, {"top_p": 0.45}]),
    "top_p hot": ({"top_p": 0.6, "temperature": 1.5}, [{"top_p": 0.6}]),
    "min_p": ({"min_p": 0.1}, [{"min_p": 0.08}, {"min_p": 0.13}]),
    "min_p hot": ({"min_p": 0.2, "temperature": 1.5}, [{"min_p": 0.2}]),
    "all": (
        {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.03},
        [
            {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.5},
            {"temperature": 1.2, "top_k": 12, "min_p": 0.03},
            {"temperature": 1.2, "top_k": 6, "top_p": 0.9, "min_p": 0.03},
        ],
    ),
}
SIZES = {"small": 64, "wide": 151_936}
ACCEPTED = 0.01 / (2 * 3 * len(CASES))
"""A right sampler fails a test of this file for one choice of seeds in a hundred (Bonferroni)."""
REFUSED = 1e-6
"""The p of a wrong parameter must be below this."""


def some_logits(vocab_size, dtype=torch.float32):
    """[V]: 40 tokens hold most of the mass: at both ends, in between, some beside each other.

    They stand on a ladder of eighths, so that a small change of a parameter changes what is kept.
    """
    generator = torch.Generator().manual_seed(vocab_size)
    logits_V = torch.randn(vocab_size, generator=generator) - 14
    places = torch.randperm(vocab_size - 4, generator=generator)[:36] + 2
    places = torch.cat([places, torch.tensor([0, 1, vocab_size - 2, vocab_size - 1])])
    logits_V[places] = torch.randperm(40, generator=generator) / 8 - 2.5
    return logits_V.to(dtype)


def draw(logits_V, fields):
    """Counts [V] of many draws: a sequence a seed, position after position."""
    slots = Slots(NUM_ROWS, 4, torch.device(DEVICE))
    tables = SamplingTables(slots.tables, len(logits_V), (1,))
    params = SamplingParams(**fields)
    admissions = (Admission(slot, params, slot * 7919 + 3, 1, (5,)) for slot in range(NUM_ROWS))
    tables.update(Batch((), tuple(admissions)))
    slots_R = torch.arange(NUM_ROWS, device=DEVICE)
    chunks = [Chunk(slot, 0, 1, (), True) for slot in range(NUM_ROWS)]
    flags = tables.flags(chunks)
    logits_RV = logits_V.to(DEVICE).repeat(NUM_ROWS, 1)
    ring = ResultRing(NUM_STEPS, NUM_ROWS, torch.device(DEVICE))
    for _ in range(NUM_STEPS):
        rows = decoding_rows(slots, slots_R, block_size=32)  # 4 blocks hold them all
        sample(logits_RV, tables, slots_R, flags.sampling(rows), flags, ring=ring)
    entries = ring.expect(NUM_STEPS)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return torch.cat(entries).bincount(minlength=len(logits_V))


def probabilities(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The definitions, one after another in float64: min-p, then top-k, then top-p."""
    kept_V = torch.softmax(logits_V.double() / temperature, dim=0)
    kept_V = torch.where(kept_V >= min_p * kept_V.max(), kept_V, 0.0)
    if top_k:
        kept_V = torch.where(kept_V >= kept_V.topk(top_k).values[-1], kept_V, 0.0)
    kept_V = kept_V / kept_V.sum()
    if top_p < 1:
        values, where = kept_V.unique(return_inverse=True)  # equals stay or go together
        mass = torch.zeros_like(values).scatter_add(0, where, kept_V)
        above_V = (mass.sum() - mass.cumsum(0))[where]
        kept_V = torch.where(above_V < top_p, kept_V, 0.0)
    return kept_V / kept_V.sum()


def p_value(counts_V, expected_V):
    """Pearson's chi-square test; tokens of fewer than five expected draws are put together."""
    expected_V = expected_V * counts_V.sum()
    if counts_V[expected_V == 0].sum() > 0:
        return 0.0  # drawn, and cannot be
    is_common_V = expected_V >= 5
    rest = counts_V[~is_common_V].sum()[None], expected_V[~is_common_V].sum()[None]
    counts = torch.cat([counts_V[is_common_V], rest[0]])
    expected = torch.cat([expected_V[is_common_V], rest[1]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    if freedom == 0:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return torch.special.gammaincc(half, statistic / 2).item()


def check(logits_V, case):
    fields, neighbours = CASES[case]
    counts_V = draw(logits_V, fields)
    assert counts_V.sum() == NUM_ROWS * NUM_STEPS
    assert p_value(counts_V, probabilities(logits_V, **fields)) > ACCEPTED
    wrong = [p_value(counts_V, probabilities(logits_V, **other)) for other in neighbours]
    assert max(wrong) < REFUSED, "a wrong parameter would pass for this one"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", SIZES)
def test_draws_follow_the_parameters(size, case):
    check(some_logits(SIZES[size]), case)


@pytest.mark.parametrize("case", ["temperature 1", "top_k 7", "top_p", "min_p", "all"])
def test_so_they_do_in_bf16(case):
    """Thousands of unlikely tokens are equal there; none is preferred."""
    check(some_logits(SIZES["wide"], torch.bfloat16), case)
