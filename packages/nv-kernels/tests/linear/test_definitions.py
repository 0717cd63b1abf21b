"""The products and the look-up against float64."""

import nv_kernels as nk
import pytest
import torch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-2, torch.bfloat16: 2e-1}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("biased", [True, False])
def test_linear(tokens, biased, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, 96).to(dtype), torch.randn(40, 96).to(dtype)
    bias = torch.randn(40).to(dtype) if biased else None
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    out = nk.linear(x, weight, bias)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=1e-2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [0, 1, 16, 70])
@pytest.mark.parametrize("biased", [True, False])
def test_a_packed_weight_multiplies_alike(tokens, biased, dtype):
    torch.manual_seed(1)
    x, weight = torch.randn(tokens, 96).to(dtype), torch.randn(40, 96).to(dtype)
    bias = torch.randn(40).to(dtype) if biased else None
    packed = nk.pack_weight(weight)
    torch.testing.assert_close(
        nk.linear(x, packed, bias), nk.linear(x, weight, bias), atol=TOLERANCE[dtype], rtol=1e-2
    )


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_embedding(index):
    weight = torch.randn(10, 8).bfloat16()
    ids = torch.tensor([3, 0, 9, 3], dtype=index)
    assert torch.equal(nk.embedding(ids, weight), weight[[3, 0, 9, 3]])
