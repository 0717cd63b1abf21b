"""The residual stream of a decoder, which its ops read and write.

A product that is added to the stream may stay pending: then the next norm adds it and norms in one
launch (and sums the partials of a split product).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from nv_kernels.elementwise.norm import add_rms_norm
from nv_kernels.ranks.all_reduce import all_reduce_add_rms_norm

if TYPE_CHECKING:
    import torch

    from nv_kernels.ranks.peers import PeerBuffers


class Norm(Protocol):
    """An RMS norm (Zhang and Sennrich 2019, arXiv 1910.07467) of the stream."""

    @property
    def weight(self) -> torch.Tensor:
        """[E], in the stream's dtype, or in fp32: then the result is rounded once."""

    @property
    def eps(self) -> float:
        """Added to the mean square."""


class Stream(NamedTuple):
    """The residual stream between two ops.

    Attributes:
        hidden: [T, E].
        pending: a product that is not added yet: None, [T, E], or [P, T, E] partials.
        peers: None, or the buffers through which the norm sums pending over the ranks.
    """

    hidden: torch.Tensor
    pending: torch.Tensor | None = None
    peers: PeerBuffers | None = None


def normalise(stream: Stream, norm: Norm) -> tuple[torch.Tensor, Stream]:
    """Add the pending product and norm; also used after the last layer.

    Args:
        stream: the residual.
        norm: weight and eps.

    Returns:
        The normed stream [T, E], and the stream itself with nothing pending.
    """
    hidden, pending, peers = stream
    if pending is None:
        normed, hidden = add_rms_norm(hidden, None, norm.weight, norm.eps)
    elif peers is None:
        normed, hidden = add_rms_norm(pending, hidden, norm.weight, norm.eps)
    else:
        normed, hidden = all_reduce_add_rms_norm(pending, hidden, norm.weight, norm.eps, peers)
    return normed, Stream(hidden)


def add_pending(stream: Stream) -> Stream:
    """Add the pending product: for a reader that does not norm the stream.

    Returns:
        The stream with nothing pending.
    """
    hidden, pending, peers = stream
    if pending is None:
        return stream
    if peers is None and pending.dim() == 2:
        return Stream(hidden + pending)
    return normalise(stream, Unread(hidden[0]))[1]


class Unread(NamedTuple):
    """The norm of `add_pending`, whose result is not read: its launch sums partials and ranks.

    So the weight may be any tensor of its shape and dtype; a new one would be another launch.
    """

    weight: torch.Tensor
    eps: float = 1.0


def scale_pending(stream: Stream, factor: float) -> Stream:
    """Multiply the pending product by a factor, before it is added."""
    assert stream.pending is not None, "a product must be pending"
    return stream._replace(pending=stream.pending * factor)


def norm_pending(stream: Stream, norm: Norm) -> Stream:
    """Norm the pending product itself, before it is added: a norm after attention or the MLP.

    Args:
        stream: the residual, with a product pending (`Weight.linear_pending`).
        norm: weight and eps.

    Returns:
        The stream, whose `pending` is the normed product [T, E].
    """
    hidden, pending, peers = stream
    assert pending is not None, "a product must be pending"
    if peers is None:
        normed, _ = add_rms_norm(pending, None, norm.weight, norm.eps, hidden.dtype)
    else:
        normed, _ = all_reduce_add_rms_norm(
            pending, None, norm.weight, norm.eps, peers, hidden.dtype
        )
    return Stream(hidden, normed)
