"""Rotation, cache writes and block copies against their definitions."""

import nv_kernels as nk
import pytest
import torch
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels import reference
from nv_kernels.cache import triton_copy as copy_blocks
from nv_kernels.cache import triton_rope as rope_store
from nv_kernels.cache import triton_write as store_kv
from nv_kernels.cache.layout import KVLayout

FP8 = torch.float8_e4m3fn
SIZES = ((5, 4, 2),) if INTERPRETING else ((5, 4, 2), (1, 16, 8), (300, 9, 3), (2048, 32, 8))


def caches(dtype, head_dim, num_kv_heads, order="NHD", block_size=16, num_blocks=160):
    """Two equal empty caches."""
    layout = KVLayout(num_blocks, block_size, num_kv_heads, head_dim, dtype, order)
    scales = (0.5, 0.25) if dtype == FP8 else (1.0, 1.0)
    return [nk.KVCache(c.k, c.v, *scales) for c in (layout.allocate(DEVICE) for _ in range(2))]


def draw(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def table(head_dim, length=512):
    inverse = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(length)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)


def slots(count, total=160 * 16, skip=True):
    found = torch.randperm(total, generator=torch.Generator().manual_seed(3))[:count]
    if skip:
        found[count // 2] = -1
    return found.to(DEVICE)


def close(actual, expected):
    """Assert equality up to two units in the last place.

    The sum of squares is added in another order, which may move the norm's rounding by a unit,
    and each later rounding may add to it; near a cancellation of the rotation the unit is that of
    the products, whose size is at most about 4.
    """
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}
    step = unit.get(expected.dtype, 2**-3)  # e4m3 has three bits
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2 * step, atol=4 * step)


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


@on_device
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(
    ("norm", "part"), [(torch.bfloat16, 1), (None, 1), (torch.float32, 0.5), (None, 0)]
)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
def test_qk_norm_rope_store(size, head_dim, norm, kv_dtype, part):
    num_tokens, num_q_heads, num_kv_heads = size
    order = "HND" if kv_dtype == FP8 else "NHD"
    ours, theirs = caches(kv_dtype, head_dim, num_kv_heads, order)
    qkv = draw(num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim)
    weights = [draw(head_dim, dtype=norm, seed=seed) if norm else None for seed in (1, 2)]
    positions = torch.arange(num_tokens, device=DEVICE, dtype=torch.int32) * 7 % 512
    rest = (1e-6, positions, table(int(head_dim * part)) if part else None)
    mapping = slots(num_tokens, skip=num_tokens > 1)
    q = rope_store.qk_norm_rope_store(qkv, *weights, *rest, ours, mapping, num_q_heads)
    expected = reference.qk_norm_rope_store(qkv, *weights, *rest, theirs, mapping, num_q_heads)
    close(q, expected)
    close(ours.k, theirs.k)
    assert torch.equal(ours.v.float(), theirs.v.float())


@on_device
@pytest.mark.parametrize("norm", [torch.bfloat16, torch.float32])
def test_split_k_partials(norm):
    ours, theirs = caches(torch.bfloat16, 64, 2)
    parts = draw(3, 5, 8 * 64, dtype=torch.float32)
    weights = draw(64, dtype=norm, seed=1), draw(64, dtype=norm, seed=2)
    rest = (1e-6, torch.arange(5, device=DEVICE), table(64))
    q = rope_store.qk_norm_rope_store(parts, *weights, *rest, ours, slots(5), 4, torch.bfloat16)
    whole = parts.sum(0).to(torch.bfloat16)
    close(q, reference.qk_norm_rope_store(whole, *weights, *rest, theirs, slots(5), 4))
    close(ours.k, theirs.k)
    close(ours.v, theirs.v)


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
def test_apply_rope(dtype, head_dim):
    x = draw(6, 3, head_dim, dtype=dtype)
    positions = torch.tensor([0, 1, 500, 7, 7, 3], device=DEVICE)
    for rotated in (head_dim, head_dim // 2 + 2):
        out = rope_store.apply_rope(x, positions, table(rotated))
        close(out, reference.apply_rope(x, positions, table(rotated)))


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_store_kv(dtype, order):
    ours, theirs = caches(dtype, 96, 3, order)
    source = torch.float16 if dtype == FP8 else dtype
    packed = draw(9, 8, 96, dtype=source) * 300  # outside e4m3's range after scaling
    k, v = packed[:, 1:4], packed[:, 4:7]
    store_kv.store_kv(k, v, ours, slots(9).int())
    reference.store_kv(k, v, theirs, slots(9).int())
    assert torch.equal(ours.k.float(), theirs.k.float())
    assert torch.equal(ours.v.float(), theirs.v.float())


@on_device
def test_fp8_rounds_as_torch_does():
    """Every e4m3 value, and every midpoint between neighbours, on either side."""
    values = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat((values, middles, middles * (1 + 2**-10), middles * (1 - 2**-10)))
    x = torch.cat((x, -x, torch.tensor([500.0, -1e4]))).to(DEVICE)
    x = torch.nn.functional.pad(x, (0, -x.numel() % 64)).view(-1, 1, 64)
    layout = KVLayout(2, 16, 1, 64, FP8, "NHD")
    ours, theirs = layout.allocate(DEVICE), layout.allocate(DEVICE)
    mapping = torch.arange(x.shape[0], device=DEVICE)
    store_kv.store_kv(x, x, ours, mapping)
    reference.store_kv(x, x, theirs, mapping)
    assert torch.equal(ours.k.view(torch.uint8), theirs.k.view(torch.uint8))


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, torch.float32])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_copy_blocks(dtype, order):
    ours, theirs = caches(dtype, 80, 3, order, block_size=32, num_blocks=8)
    for cache in (ours, theirs):
        for tensor, seed in ((cache.k, 1), (cache.v, 2)):
            tensor.copy_(draw(*tensor.shape, dtype=torch.float32, seed=seed))
    pairs = [torch.tensor(x, device=DEVICE) for x in ([0, 0, 3, 1], [1, 2, 4, 7], [32, 16, 7, 0])]
    pairs[0][3] = 5
    copy_blocks.copy_blocks(ours, *pairs)
    reference.copy_blocks(theirs, *pairs)
    assert torch.equal(ours.k.float(), theirs.k.float())
    assert torch.equal(ours.v.float(), theirs.v.float())
