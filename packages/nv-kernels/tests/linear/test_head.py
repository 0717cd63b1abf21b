"""The head's product on a CPU: fp32 for every weight, by kernels and by torch.

For a card, test_triton_linear.py and test_batch_invariant_linear.py test it.
"""

import nv_kernels as nk
import pytest
import torch
from nv_kernels.cpp import linear as ops
from nv_kernels.cpp.library import find_compiler

compiled = pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
# A vocabulary that lies in tiles of AMX, and one that does not.
SHAPES = [(320, 64), (299, 100)]


def draw(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def head(vocabulary, columns, dtype, rows=70):
    weight = draw(vocabulary, columns, dtype=dtype, seed=1) * columns**-0.5
    hidden = draw(rows, columns, dtype=dtype)
    return hidden, weight, hidden.double() @ weight.double().T


def assert_unrounded(logits, truth):
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocabulary", "columns"), SHAPES)
def test_the_definition_does_not_round(vocabulary, columns, dtype):
    hidden, weight, truth = head(vocabulary, columns, dtype)
    assert_unrounded(nk.reference.logits(hidden, weight), truth)
    assert_unrounded(nk.reference.batch_invariant_logits(hidden, weight), truth)


@compiled
@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("op", [nk.logits, nk.batch_invariant_logits])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocabulary", "columns"), SHAPES)
def test_the_kernels_do_not_round(vocabulary, columns, dtype, op, packed, tiles, monkeypatch):
    if not tiles:
        monkeypatch.setattr(ops, "has_tiles", lambda: False)
    hidden, weight, truth = head(vocabulary, columns, dtype)
    weight = nk.pack_head(weight) if packed else weight
    whole = op(hidden, weight)
    assert_unrounded(whole, truth)
    for rows in (1, 2, 5, 17, 69):
        assert torch.equal(op(hidden[1 : 1 + rows], weight), whole[1 : 1 + rows])
    assert op(hidden[:0], weight).shape == (0, vocabulary)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("op", [nk.logits, nk.batch_invariant_logits])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_kernels_16_bits_are_rounded_and_widened(dtype, op, packed, monkeypatch):
    monkeypatch.setattr(ops, "kernel", lambda *_: None)
    monkeypatch.setattr(ops, "has_tiles", lambda: False)
    hidden, weight, truth = head(320, 64, dtype)
    logits = op(hidden, nk.pack_head(weight) if packed else weight)
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), truth, rtol=rtol, atol=rtol)
    assert torch.equal(logits, logits.to(dtype).float())
