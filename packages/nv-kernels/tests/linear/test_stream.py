"""A norm of the pending product, before it is added to the stream."""

from typing import NamedTuple

import nv_kernels as nk
import pytest
import torch


class RMS(NamedTuple):
    weight: torch.Tensor
    eps: float = 1e-6


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["fast", "batch_invariant"])
def test_what_a_layer_adds_may_be_normed_first(kind):
    x, hidden, values = draw(5, 24, seed=0), draw(5, 32, seed=1), draw(32, 24, seed=2)
    after, before = RMS(draw(32, seed=3)), RMS(draw(32, seed=4))
    weight = nk.arithmetic(kind).weight(values.clone())
    stream = nk.norm_pending(weight.linear_pending(x, nk.Stream(hidden.clone())), after)
    assert torch.equal(stream.hidden, hidden)
    normed, stream = nk.normalise(stream, before)

    added = hidden + nk.reference.rms_norm(x @ values.T, *after)
    torch.testing.assert_close(stream.hidden, added)
    torch.testing.assert_close(normed, nk.reference.rms_norm(added, *before))


def test_partials_are_summed_first():
    partials, hidden, norm = draw(3, 5, 32, seed=0), draw(5, 32, seed=1), RMS(draw(32, seed=2))
    stream = nk.norm_pending(nk.Stream(hidden, partials), norm)
    torch.testing.assert_close(stream.pending, nk.reference.rms_norm(partials.sum(0), *norm))


def test_a_stream_may_be_read_without_a_norm():
    hidden, product, partials = draw(5, 32, seed=0), draw(5, 32, seed=1), draw(3, 5, 32, seed=2)
    assert nk.add_pending(nk.Stream(hidden)).hidden is hidden
    for pending, total in ((product, product), (partials, partials.sum(0))):
        stream = nk.add_pending(nk.scale_pending(nk.Stream(hidden, pending), 0.5))
        assert stream.pending is None
        torch.testing.assert_close(stream.hidden, hidden + 0.5 * total)
