"""Draws have the distribution that the parameters ask for: chi-square tests on fixed seeds.

The truth is made of the raw log-probabilities that the model reports, by definitions of a few lines
here. Each case also names neighbours of its parameters, and the test has the power to tell them
apart: the same draws are refused as a sample of theirs.
"""

import pytest
import torch
from nv_api import LLM, SamplingParams
from tiny_checkpoint import make

NUM_DRAWS = 5000
PROMPTS = [[7, 8, 9, *range(30)], [200, 3]]

CASES = {
    "temperature 1": ({"temperature": 1.0}, [{"temperature": 0.85}, {"temperature": 1.15}]),
    "temperature 0.6": ({"temperature": 0.6}, [{"temperature": 0.5}, {"temperature": 0.7}]),
    "temperature 2.5": ({"temperature": 2.5}, [{"temperature": 1.8}, {"temperature": 4.0}]),
    "top_k 1": ({"top_k": 1}, [{"top_k": 2}]),
    "top_k 7": ({"top_k": 7}, [{"top_k": 6}, {"top_k": 8}]),
    "top_k hot": (
        {"top_k": 9, "temperature": 2.0},
        [{"top_k": 9}, {"top_k": 10, "temperature": 2.0}],
    ),
    "top_p": ({"top_p": 0.8}, [{"top_p": 0.75}, {"top_p": 0.85}]),
    "top_p small": ({"top_p": 0.3}, [{"top_p": 0.2}, {"top_p": 0.4}]),
    "top_p hot": ({"top_p": 0.6, "temperature": 1.5}, [{"top_p": 0.6}]),
    "min_p": ({"min_p": 0.1}, [{"min_p": 0.08}, {"min_p": 0.13}]),
    "min_p hot": ({"min_p": 0.2, "temperature": 1.5}, [{"min_p": 0.2}]),
    "all": (
        {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.03},
        [
            {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.3},
            {"temperature": 1.2, "top_k": 12, "min_p": 0.03},
            {"temperature": 1.2, "top_k": 6, "top_p": 0.9, "min_p": 0.03},
        ],
    ),
}
ACCEPTED = 0.01 / (2 * len(CASES) + 1)
"""A right sampler fails a test of this file for one choice of seeds in a hundred (Bonferroni)."""
REFUSED = 1e-6
"""The p of a wrong parameter must be below this."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    torch.set_num_threads(1)
    folder = make(tmp_path_factory.mktemp("spread"), tie_word_embeddings=False)
    options = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 1200}
    with LLM(str(folder), **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def raw(llm):
    """Log-probabilities [V] of the first token after each prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    found = []
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        (said,) = output.outputs[0].logprobs
        values = [said[token].logprob for token in range(len(said))]
        found.append(torch.tensor(values, dtype=torch.float64))
    return found


def probabilities(raw_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The definitions, one after another on float64: min-p, then top-k, then top-p."""
    kept_V = torch.softmax(raw_V / temperature, dim=0)
    kept_V = torch.where(kept_V >= min_p * kept_V.max(), kept_V, 0.0)
    if top_k:
        kept_V = torch.where(kept_V >= kept_V.sort(descending=True).values[top_k - 1], kept_V, 0.0)
    kept_V = kept_V / kept_V.sum()
    if top_p < 1:
        sorted_V, order_V = kept_V.sort(descending=True)
        above_V = sorted_V.cumsum(0) - sorted_V
        kept_V = torch.zeros_like(kept_V).scatter(0, order_V, sorted_V * (above_V < top_p))
    return kept_V / kept_V.sum()


def p_value(counts_V, expected_V):
    """Pearson's chi-square test; tokens of fewer than five expected draws are put together."""
    expected_V = expected_V * counts_V.sum()
    if counts_V[expected_V == 0].sum() > 0:
        return 0.0  # drawn, and cannot be
    rare_V = (expected_V < 5) & (expected_V > 0)
    common_V = expected_V >= 5
    counts = [*counts_V[common_V].tolist(), counts_V[rare_V].sum().item()]
    expected = [*expected_V[common_V].tolist(), expected_V[rare_V].sum().item()]
    pairs = [(n, e) for n, e in zip(counts, expected, strict=True) if e > 0]
    freedom = len(pairs) - 1
    if freedom == 0:
        return 1.0
    statistic = sum((n - e) ** 2 / e for n, e in pairs)
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_parameters(llm, raw, case):
    fields, neighbours = CASES[case]
    params = [SamplingParams(max_tokens=1, n=NUM_DRAWS, seed=seed, **fields) for seed in (1, 2)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    wrong = [1.0] * len(neighbours)
    for output, raw_V in zip(outputs, raw, strict=True):
        drawn = torch.tensor([token for each in output.outputs for token in each.token_ids])
        counts_V = drawn.bincount(minlength=len(raw_V))
        assert counts_V.sum() == NUM_DRAWS
        assert p_value(counts_V, probabilities(raw_V, **fields)) > ACCEPTED
        found = [p_value(counts_V, probabilities(raw_V, **other)) for other in neighbours]
        wrong = list(map(min, wrong, found))
    assert max(wrong) < REFUSED, "a wrong parameter would pass for this one"


def test_every_seed_and_index_draws_anew(llm, raw):
    """One draw of each of many seeds is a sample too, and so are the later positions."""
    params = [SamplingParams(max_tokens=1, seed=seed) for seed in range(3000)]
    outputs = llm.generate([PROMPTS[0]] * 3000, params, use_tqdm=False)
    drawn = torch.tensor([output["token_ids"][0] for output in outputs])
    counts_V = drawn.bincount(minlength=len(raw[0]))
    assert p_value(counts_V, probabilities(raw[0])) > ACCEPTED
