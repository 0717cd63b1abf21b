"""The gate against float64."""

import nv_kernels as nk
import pytest
import torch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-2, torch.bfloat16: 2e-1}


def assert_gated(out, expected):
    atol, rtol = TOLERANCE[out.dtype] / 10, 1e-5 if out.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_silu_and_mul(dtype):
    torch.manual_seed(0)
    x = (torch.randn(5, 64) * 4).to(dtype)
    gate, up = x.double().chunk(2, -1)
    out = nk.silu_and_mul(x)
    assert out.dtype == dtype
    assert_gated(out, gate / (1 + (-gate).exp()) * up)


def test_silu_is_rounded_before_it_multiplies():
    x = torch.randn(5, 64).bfloat16()
    gate, up = x.chunk(2, -1)
    assert torch.equal(nk.silu_and_mul(x), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gelu_of", [nk.gelu_tanh_and_mul, nk.reference.gelu_tanh_and_mul])
def test_gelu_is_torch_s(gelu_of, dtype):
    torch.manual_seed(0)
    x = (torch.randn(5, 64) * 4).to(dtype)
    gate, up = x.double().chunk(2, -1)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    out = gelu_of(x)
    assert out.dtype == dtype
    assert_gated(out, expected)
    assert gelu_of(torch.full((1, 8), -1e4).to(dtype)).abs().max().item() < 1e-20
