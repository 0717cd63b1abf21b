"""The draw of a token from its logits: the definition that every version reproduces up to rounding.

For one row, let x_i be the logit of id i < num_ids, h the highest of them, T the temperature.

- Temperature: w_i = softmax((x - h) / T)_i, in fp32. With T = 0 the token is the lowest id with
  x_i = h, and the rest is skipped.
- min-p keeps the ids with (x_i - h) / T >= log(min_p). top-k keeps those with x_i >= the k-th
  highest logit, so all ties with it. The softmax is over the ids that both keep: the set S_0.
- Draw r from a set S: the first id, in order of id, at which the sum of S's w from id 0 exceeds
  u_r times the sum of all of S's. The sums are fp64.
- top-p: let above(t) be the sum of w_i over x_i > x_t. The token t drawn from S_r is accepted if
  above(t) < top_p * sum(S_0), or if above(t) = 0. Else S_(r+1) is the ids with x_i > x_t, and the
  draw is repeated. Every S_r contains the nucleus, the set of all ids that would be accepted, so
  the token has the nucleus's distribution. Ties with the last id of the nucleus belong to it.

u_r in [0, 1) is a function of the seed, the position and r (`philox`). There is no generator state:
a row's token depends only on its logits, parameters, seed and position, never on the other rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.op import op
from nv_kernels.sampling.philox import uniform

if TYPE_CHECKING:
    from nv_kernels.sampling.parameters import SamplingTensors


@op(triton="nv_kernels.sampling.triton_sample", cpp="nv_kernels.cpp.sample")
def sample(logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """Draw one token per row.

    A token at -inf is never drawn. A row from which no token can be drawn (all -inf, or a NaN or
    +inf among its logits) gets -1. Logits from `sampling.num_ids` on are not read.

    Args:
        logits: [R, V] fp32, bf16 or fp16.
        sampling: parameters of the R rows; rows may differ in all of them.

    Returns:
        Token ids [R] int64.
    """
    x = logits[:, : sampling.num_ids].float()
    highest = x.amax(-1, keepdim=True)
    greedy = sampling.temperature == 0
    scaled = (x - highest) / torch.where(greedy, 1.0, sampling.temperature)[:, None]  # [R, V]

    last = x.shape[1] - 1
    place = torch.where(sampling.top_k > 0, sampling.top_k.long() - 1, last).clamp(max=last)
    kth = x.sort(-1, descending=True).values.gather(1, place[:, None])
    kept = (scaled >= sampling.min_p.log()[:, None]) & (x >= kth)
    weights = scaled.masked_fill(~kept, float("-inf")).softmax(-1).double()

    limit = sampling.top_p * weights.cumsum(-1)[:, -1]
    tokens, drawing, within, turn = x.argmax(-1), ~greedy, weights, 0
    while drawing.any():
        drawn = _draw(within, uniform(sampling.seeds, sampling.positions, turn))
        tokens = torch.where(drawing, drawn, tokens)
        within = torch.where(x > x.gather(1, drawn[:, None]), weights, 0.0)
        above = within.cumsum(-1)[:, -1]
        drawing &= (sampling.top_p < 1) & (above >= limit) & (above > 0)
        turn += 1
    return torch.where(highest[:, 0].isfinite(), tokens, -1)


def _draw(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return the first ids [R] at which the weights [R, V], added up, exceed u [R] of their sum."""
    sums = weights.cumsum(-1)
    # A row that has ended may have no weights: its id is not used, but must exist.
    target = u[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, target, right=True)[:, 0].clamp(max=weights.shape[1] - 1)
