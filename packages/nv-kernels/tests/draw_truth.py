"""The tokens that a draw may return if sums are rounded: the definition in float64 with slack."""

import math

import torch
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
