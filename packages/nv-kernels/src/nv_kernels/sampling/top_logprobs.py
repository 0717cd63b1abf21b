"""Log-probabilities of tokens and of the most likely ones.

They are computed from raw logits, before controls and temperature.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from nv_kernels.op import op

MAX_PART = 2**24  # logits per pass: their copy in fp32 takes 64 MiB


@op(triton="nv_kernels.sampling.triton_top_logprobs")
def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Look up tokens and the most likely ones, the lowest ids first among equals.

    A row's result depends only on its logits. A token's rank is 1 plus the number of tokens with
    higher logits, so that ties share a rank.

    Args:
        logits: [N, V] raw, fp32, bf16 or fp16.
        token_ids: [N] int64.
        num_logprobs: K, at most V.

    Returns:
        token_ids [N, K + 1] int64 (the token itself, then the most likely, best first), their
        logprobs [N, K + 1] fp32 (log_softmax in fp32), and the token's rank [N] int64.
    """
    # A card sums all rows that begin at a multiple of 16 bytes in the same order.
    padded = functional.pad(logits, (0, -logits.shape[1] % 16), value=-torch.inf)
    step = max(1, MAX_PART // padded.shape[1])
    parts = zip(torch.split(padded, step), torch.split(token_ids, step), strict=True)
    found = [_top_logprobs(part, ids, num_logprobs) for part, ids in parts]
    ids, logprobs, ranks = map(torch.cat, zip(*found, strict=True))
    return ids, logprobs, ranks


def _top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    own = token_ids[:, None]
    ranks = (logits > logits.gather(1, own)).sum(-1) + 1
    ids = torch.cat([own, _top(logits.float(), num_logprobs)], dim=1)
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    return ids, logprobs.gather(1, ids), ranks


def _top(logits: torch.Tensor, num_logprobs: int) -> torch.Tensor:
    """Return the ids of the K highest logits. Order and id together are a unique key."""
    bits = (logits + 0.0).view(torch.int32).long()  # -0 becomes 0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # orders like the logits
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (order << 32) - ids
    top = keys.topk(num_logprobs, dim=-1).values
    return -top & 0xFFFFFFFF
