"""The cache's layout and its views."""

import nv_kernels as nk
import pytest
import torch


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_layout(order, dtype):
    layout = nk.KVLayout(5, 16, 3, 64, dtype, order)
    kv = layout.allocate("cpu")
    assert kv.k.shape == kv.v.shape == (5, 16, 3, 64)
    assert kv.k.stride(-1) == 1
    assert (kv.k.stride(1) > kv.k.stride(2)) == (order == "NHD")
    assert layout.block_bytes * 5 == kv.k.untyped_storage().nbytes()
    assert kv.device.type == "cpu"
    assert not kv.k.view(torch.uint8).any()


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_of_a_cache_that_is_not_fp8_are_its_own_tensors(order, dtype):
    kv = nk.KVLayout(5, 16, 3, 64, dtype, order).allocate("cpu")
    assert not kv.is_fp8
    for k, v in (kv.loaded(), kv.stored()):
        assert k is kv.k
        assert v is kv.v


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_views_of_an_fp8_cache_are_pairs_to_load_and_bytes_to_store(order):
    kv = nk.KVLayout(5, 16, 3, 64, torch.float8_e4m3fn, order).allocate("cpu")
    assert kv.is_fp8
    kv.k[2, 3, 1, 4:6] = torch.tensor([1.0, -2.0]).to(kv.k.dtype)
    pairs, stored = kv.loaded()[0], kv.stored()[0]
    assert (pairs.shape, pairs.dtype) == ((5, 16, 3, 32), torch.int16)
    assert pairs[2, 3, 1, 2].item() == 0xC038 - 2**16
    assert stored[2, 3, 1, 4:6].tolist() == [0x38, 0xC0]
