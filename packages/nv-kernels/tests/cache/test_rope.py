"""Rotation, and the op that norms, rotates and stores."""

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
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rope_rotates_pairs_of_halves(head_dim, dtype, index):
    torch.manual_seed(0)
    x = randn(5, 3, head_dim, dtype=dtype)
    positions = torch.tensor([0, 1, 99, 1, 50], dtype=index)
    cos_sin = table(100, head_dim)
    out = nk.apply_rope(x, positions, cos_sin)
    assert torch.equal(out[0], x[0])  # position 0 rotates by no angle
    first, second = x.double().chunk(2, -1)
    cos, sin = cos_sin[positions.long()].double()[:, None].chunk(2, -1)
    turned = torch.complex(first, second) * torch.complex(cos, sin)
    close(out, torch.cat((turned.real, turned.imag), -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [2, 20, 48])
def test_a_part_of_a_head_may_turn(rotated, dtype):
    torch.manual_seed(0)
    x, positions, cos_sin = randn(5, 3, 48, dtype=dtype), torch.arange(5), table(5, rotated)
    out = nk.apply_rope(x, positions, cos_sin)
    assert torch.equal(out[..., rotated:], x[..., rotated:])
    part = nk.apply_rope(x[..., :rotated].contiguous(), positions, cos_sin)
    assert torch.equal(out[..., :rotated], part)


def test_rope_rounds_the_table_first():
    torch.manual_seed(0)
    x, positions, cos_sin = randn(7, 2, 64).bfloat16(), torch.arange(7), table(7, 64)
    cos, sin = cos_sin.bfloat16()[:, None].chunk(2, -1)
    rotated = torch.cat((-x[..., 32:], x[..., :32]), -1)
    expected = x * torch.cat((cos, cos), -1) + rotated * torch.cat((sin, sin), -1)
    assert torch.equal(nk.apply_rope(x, positions, cos_sin), expected)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("rotated", [64, 16, 0])
def test_fused_equals_its_parts(normed, order, rotated):
    torch.manual_seed(0)
    tokens, num_q_heads, num_kv_heads, head_dim = 6, 4, 2, 64
    qkv = randn(tokens, (num_q_heads + 2 * num_kv_heads) * head_dim)
    weights = (randn(head_dim), randn(head_dim)) if normed else (None, None)
    layout = nk.KVLayout(4, 16, num_kv_heads, head_dim, torch.float32, order)
    kv, expected = layout.allocate("cpu"), layout.allocate("cpu")
    positions, slots = torch.arange(3, 9), torch.tensor([40, 2, -1, 17, 3, 63])
    cos_sin, before = table(20, rotated) if rotated else None, qkv.clone()
    q = nk.qk_norm_rope_store(qkv, *weights, 1e-6, positions, cos_sin, kv, slots, num_q_heads)
    heads = qkv.view(tokens, -1, head_dim)
    q_part, k_part, v_part = heads[:, :4], heads[:, 4:6], heads[:, 6:]
    if normed:
        q_part = nk.rms_norm(q_part, weights[0], 1e-6)
        k_part = nk.rms_norm(k_part, weights[1], 1e-6)
    if rotated:
        q_part = nk.apply_rope(q_part, positions, cos_sin)
        k_part = nk.apply_rope(k_part, positions, cos_sin)
    nk.store_kv(k_part, v_part, expected, slots)
    assert torch.equal(q, q_part)
    assert torch.equal(kv.k, expected.k)
    assert torch.equal(kv.v, expected.v)
    assert torch.equal(qkv, before)
