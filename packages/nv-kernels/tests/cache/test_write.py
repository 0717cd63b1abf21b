"""Stores and copies."""

import nv_kernels as nk
import pytest
import torch


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_store_writes_its_slots_and_nothing_else(order, index):
    torch.manual_seed(0)
    kv = nk.KVLayout(3, 16, 2, 8, torch.float32, order).allocate("cpu")
    k, v = torch.randn(2, 5, 2, 8)
    slots = [47, -1, 0, 16, -1]
    nk.store_kv(k, v, kv, torch.tensor(slots, dtype=index))
    for cache, new in ((kv.k, k), (kv.v, v)):
        expected = torch.zeros(48, 2, 8)
        for row, slot in enumerate(slots):
            if slot >= 0:
                expected[slot] = new[row]
        assert torch.equal(cache.flatten(0, 1), expected)


def test_store_of_no_tokens():
    kv = nk.KVLayout(1, 16, 2, 8, torch.float32, "NHD").allocate("cpu")
    nothing = torch.empty(0, 2, 8)
    nk.store_kv(nothing, nothing, kv, torch.empty(0, dtype=torch.int64))
    nk.store_kv(torch.ones(1, 2, 8), torch.ones(1, 2, 8), kv, torch.tensor([-1]))
    assert not kv.k.any()
    assert not kv.v.any()


def test_store_rounds_to_the_cache():
    kv = nk.KVLayout(1, 16, 1, 8, torch.bfloat16, "NHD").allocate("cpu")
    k = torch.randn(1, 1, 8)
    nk.store_kv(k, k, kv, torch.tensor([3]))
    assert torch.equal(kv.k[0, 3], k[0].bfloat16())


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_fp8_divides_by_the_scale_and_saturates(order):
    empty = nk.KVLayout(2, 16, 1, 4, torch.float8_e4m3fn, order).allocate("cpu")
    kv = nk.KVCache(empty.k, empty.v, k_scale=0.5, v_scale=4.0)
    x = torch.tensor([[[1.0, -3.0, 1000.0, -1e30]]])
    nk.store_kv(x, x, kv, torch.tensor([17]))
    assert kv.k[1, 1, 0].float().tolist() == [2.0, -6.0, 448.0, -448.0]
    assert kv.v[1, 1, 0].float().tolist() == [0.25, -0.75, 256.0, -448.0]
    assert not kv.k[0].view(torch.uint8).any()


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_copy_blocks(order, dtype):
    torch.manual_seed(0)
    kv = nk.KVLayout(6, 16, 2, 8, dtype, order).allocate("cpu")
    kv.k.copy_(torch.randn(kv.k.shape).to(dtype))
    kv.v.copy_(torch.randn(kv.v.shape).to(dtype))
    expected = kv.k.float(), kv.v.float()
    for cache in expected:
        cache[5] = cache[0]
        cache[1, :3] = cache[0, :3]
    nk.copy_blocks(kv, torch.tensor([0, 0, 2]), torch.tensor([5, 1, 4]), torch.tensor([16, 3, 0]))
    assert torch.equal(kv.k.float(), expected[0])
    assert torch.equal(kv.v.float(), expected[1])
