"""Norms: rounding points, float64, and inputs left alone."""

import nv_kernels as nk
import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def close(value, expected):
    tolerance = TOLERANCE[value.dtype]
    torch.testing.assert_close(value.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 576), (3, 4, 80), (0, 64)])
def test_rms_norm(shape, dtype):
    torch.manual_seed(0)
    x, weight = randn(*shape, dtype=dtype) * 30, randn(shape[-1], dtype=dtype)
    x64 = x.double()
    expected = x64 / (x64.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    out = nk.rms_norm(x, weight, 1e-6)
    assert out.dtype == dtype
    close(out, expected)


def test_rms_norm_rounds_before_the_weight():
    """transformers multiplies the rounded vector; rounding only at the end gives other bits."""
    torch.manual_seed(0)
    x, weight = randn(64, 576, dtype=torch.bfloat16), randn(576, dtype=torch.bfloat16)
    fp32 = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    out = nk.rms_norm(x, weight, 1e-6)
    assert torch.equal(out, weight * fp32.bfloat16())
    assert not torch.equal(out, (weight.float() * fp32).bfloat16())


def test_a_large_half_does_not_overflow():
    x = torch.full((2, 64), 60000.0, dtype=torch.float16)
    out = nk.rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-6)
    torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_is_functional(dtype):
    torch.manual_seed(0)
    x, residual, weight = randn(3, 64, dtype=dtype), randn(3, 64, dtype=dtype), randn(64).to(dtype)
    before = x.clone(), residual.clone()
    out, total = nk.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    assert torch.equal(total, x + residual)
    assert torch.equal(out, nk.rms_norm(total, weight, 1e-6))


def test_add_rms_norm_starts_a_stream_and_sums_partials():
    torch.manual_seed(0)
    partials = randn(4, 3, 64)
    residual, weight = randn(3, 64).bfloat16(), randn(64).bfloat16()
    out, total = nk.add_rms_norm(partials, residual, weight, 1e-6)
    assert torch.equal(total, partials.sum(0).bfloat16() + residual)
    assert out.dtype == torch.bfloat16
    out, total = nk.add_rms_norm(residual, None, weight, 1e-6)
    assert torch.equal(total, residual)
    assert torch.equal(out, nk.rms_norm(residual, weight, 1e-6))
