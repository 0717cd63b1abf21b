"""The sum over ranks inside a norm, through buffers that all ranks can write.

Owns the order of the sum (by rank, in fp32, so that all ranks get the same bits) and the format of
the data in the buffers. See `nv_kernels.ranks.peers` for the rules of the buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.elementwise.norm import add_rms_norm, sum_dtype
from nv_kernels.op import op
from nv_kernels.ranks.peers import EMPTY, WRITTEN_NAN

if TYPE_CHECKING:
    from nv_kernels.ranks.peers import PeerBuffers


@op(triton="nv_kernels.ranks.triton_all_reduce")
def all_reduce_add_rms_norm(  # noqa: PLR0917  as `add_rms_norm`
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    peers: PeerBuffers,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum a layer's output over the ranks, add it to the residual stream, and normalise.

    Every rank must call it with the same T; no call ends before all ranks have called. One-shot:
    each rank sums all parts itself, which is fast for few rows or two ranks.

    Args:
        x: this rank's part: [T, E], or [P, T, E] split-K partials, which are summed in fp32 first.
            Rounded before it is sent: to residual's dtype, or else to `dtype`.
        residual: [T, E], or None if the sum starts the stream. It is not changed.
        weight: [E], in the sum's dtype or fp32.
        eps: added to the mean square.
        peers: the ranks' buffers, as tensors.
        dtype: of the sum where there is no residual, of 16 bits; None: weight's.

    Returns:
        The normalised sum [T, E] and the sum itself [T, E], equal to add_rms_norm of the parts'
        sum.
    """
    if x.dim() == 3:
        x = x.sum(0, dtype=torch.float32)
    x = x.to(sum_dtype(residual, weight, dtype))
    turns = [_sum(part, peers) for part in torch.split(x, peers.max_rows)]
    return add_rms_norm.definition(torch.cat(turns), residual, weight, eps)


def _sum(x: torch.Tensor, peers: PeerBuffers) -> torch.Tensor:
    """Sum [T, E], T at most max_rows, over the ranks in order."""
    words = _pack(x)  # [T, E / 2]
    rows = torch.arange(len(words), device=x.device)
    slots = (peers.counts[: len(words)] & 1).long()
    for other, buffer in enumerate(peers.buffers):
        if other != peers.rank:
            buffer[slots, peers.rank, rows] = words
    total = None
    for source in range(peers.size):
        if source == peers.rank:
            part = words
        else:
            while ((part := peers.own[slots, source, rows]) == EMPTY).any():
                pass
            peers.own[slots, source, rows] = EMPTY
        values = _unpack(part, x.dtype).float()  # [T, E]
        total = values if total is None else total + values
    assert total is not None, "there is a rank"
    peers.counts[: len(words)] += 1
    return total.to(x.dtype)


def _pack(values: torch.Tensor) -> torch.Tensor:
    """[T, E] of 16 bits -> [T, E / 2] int32: columns i (low half) and i + E / 2 (high half)."""
    halves = torch.stack(values.chunk(2, 1), -1)  # [T, E / 2, 2]
    words = halves.view(torch.int32)[..., 0]
    return torch.where(words == EMPTY, WRITTEN_NAN, words)


def _unpack(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo `_pack`."""
    return words[..., None].contiguous().view(dtype).transpose(1, 2).flatten(1)
