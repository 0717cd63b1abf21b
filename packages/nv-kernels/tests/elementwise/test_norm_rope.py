"""Norms, rope and the fused op: rounding points, float64, and inputs left alone."""

import nv_kernels as nk
import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def table(max_position, head_dim):
    """[max_position, D] fp32, cosines then sines."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(max_position)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1)


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
    """transformers multiplies the rounded vector: with rounding only at the end this differs."""
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rope_rotates_pairs_of_halves(head_dim, dtype, index):
    torch.manual_seed(0)
    x = randn(5, 3, head_dim, dtype=dtype)
    positions = torch.tensor([0, 1, 99, 1, 50], dtype=index)
    cos_sin = table(100, head_dim)
    out = nk.apply_rope(x, positions, cos_sin)
    assert torch.equal(out[0], x[0])  # position 0 turns nothing
    first, second = x.double().chunk(2, -1)
    cos, sin = cos_sin[positions.long()].double()[:, None].chunk(2, -1)
    turned = torch.complex(first, second) * torch.complex(cos, sin)
    close(out, torch.cat((turned.real, turned.imag), -1))


def test_rope_rounds_the_table_first():
    torch.manual_seed(0)
    x, positions, cos_sin = randn(7, 2, 64).bfloat16(), torch.arange(7), table(7, 64)
    cos, sin = cos_sin.bfloat16()[:, None].chunk(2, -1)
    rotated = torch.cat((-x[..., 32:], x[..., :32]), -1)
    expected = x * torch.cat((cos, cos), -1) + rotated * torch.cat((sin, sin), -1)
    assert torch.equal(nk.apply_rope(x, positions, cos_sin), expected)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_fused_equals_its_parts(normed, order):
    torch.manual_seed(0)
    tokens, num_q_heads, num_kv_heads, head_dim = 6, 4, 2, 64
    qkv = randn(tokens, (num_q_heads + 2 * num_kv_heads) * head_dim)
    weights = (randn(head_dim), randn(head_dim)) if normed else (None, None)
    layout = nk.KVLayout(4, 16, num_kv_heads, head_dim, torch.float32, order)
    kv, expected = layout.allocate("cpu"), layout.allocate("cpu")
    positions, slots = torch.arange(3, 9), torch.tensor([40, 2, -1, 17, 3, 63])
    cos_sin, before = table(20, head_dim), qkv.clone()
    q = nk.qk_norm_rope_store(qkv, *weights, 1e-6, positions, cos_sin, kv, slots, num_q_heads)
    heads = qkv.view(tokens, -1, head_dim)
    q_part, k_part, v_part = heads[:, :4], heads[:, 4:6], heads[:, 6:]
    if normed:
        q_part = nk.rms_norm(q_part, weights[0], 1e-6)
        k_part = nk.rms_norm(k_part, weights[1], 1e-6)
    nk.store_kv(nk.apply_rope(k_part, positions, cos_sin), v_part, expected, slots)
    assert torch.equal(q, nk.apply_rope(q_part, positions, cos_sin))
    assert torch.equal(kv.k, expected.k)
    assert torch.equal(kv.v, expected.v)
    assert torch.equal(qkv, before)
