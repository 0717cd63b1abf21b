"""The draw's definition, and what a version may return if its sums are rounded differently."""

import math

import torch
from nv_kernels import SamplingTensors, reference
from nv_kernels.sampling.philox import uniform


def acceptable(logits, temperature, top_k, top_p, min_p, seed, position, slack=2e-6):
    """Return the ids that the draw gives if its sums change by up to `slack` of the row's mass.

    Args:
        logits: [V] of one row, any float dtype.
        temperature, top_k, top_p, min_p, seed, position: the row's parameters.
        slack: relative to the total mass; fp32 sums of a few hundred tiles stay inside 2e-6.
    """
    x = logits.double().cpu()
    if temperature == 0:
        return {int(x.argmax())}
    weights = ((x - x.max()) / temperature).exp()
    kept = weights >= min_p
    if 0 < top_k < len(x):
        kept &= x >= x.topk(top_k).values[-1]
    weights = torch.where(kept, weights, 0.0)
    limit = top_p * float(weights.sum())
    answers, turns = set(), [(weights, 0)]
    while turns:
        mass, turn = turns.pop()
        total = float(mass.sum())
        u = float(uniform(torch.tensor([seed]), torch.tensor([position]), turn))
        ends = mass.cumsum(0)
        near = (ends >= u * total - slack * total) & (ends - mass <= u * total + slack * total)
        for token in torch.nonzero(near & (mass > 0)).flatten().tolist():
            above = torch.where(x > x[token], weights, 0.0)
            higher = float(above.sum())
            if top_p == 1 or higher < limit * (1 + slack):
                answers.add(token)
            if top_p < 1 and higher >= limit * (1 - slack) and turn < 64:
                turns.append((above, turn + 1))
    assert answers
    assert all(math.isfinite(float(x[token])) for token in answers)
    return answers


def assert_drawn(logits, settings, tokens, sampling, most_different):
    """Assert that every token is acceptable and all but a few equal the definition's.

    Args:
        logits: [R, V].
        settings: temperature, top_k, top_p and min_p of each row.
        tokens: [R], what a version drew.
        sampling: the SamplingTensors that it drew with.
        most_different: how many rows may differ.
    """
    expected = reference.sample(logits.cpu(), to_cpu(sampling))
    different = torch.nonzero(tokens.cpu() != expected).flatten().tolist()
    for row in different:
        numbers = (int(sampling.seeds[row]), int(sampling.positions[row]))
        ids = logits[row, : sampling.num_ids]
        assert expected[row] != -1, (row, settings[row], int(tokens[row]))
        assert int(tokens[row]) in acceptable(ids, *settings[row], *numbers), (
            row, settings[row], int(tokens[row]), int(expected[row])
        )  # fmt: skip
    assert len(different) <= most_different
    assert tokens.dtype == torch.int64


def to_cpu(sampling):
    """Copy SamplingTensors to the CPU."""
    fields = {name: value.cpu() if isinstance(value, torch.Tensor) else value
              for name, value in vars(sampling).items()}  # fmt: skip
    return SamplingTensors(**fields)
