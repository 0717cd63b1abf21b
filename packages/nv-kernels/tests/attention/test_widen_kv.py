"""The 16-bit copy of an fp8 cache's keys and values, against the cache itself."""

import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from attention_cases import step
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels.attention.triton import backend as triton
from nv_kernels.attention.triton.backend import TritonAttention
from nv_kernels.attention.triton.widen import widen_kv, widen_kv_kernel


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 64), (1, 96)])
@pytest.mark.parametrize("block_size", [64] if INTERPRETING else [64, 192, 256])
def test_every_token_that_a_chunk_sees_is_copied(block_size, num_heads, head_dim, order, dtype):
    rows = [(1, 70), (1, 1), (3, 3), (5, 129), (64, 64), (2, 0)]
    case = step(
        rows, device=DEVICE, heads=(4, num_heads), head_dim=head_dim, fp8=True, order=order,
        block_size=block_size, bounds=(64, 400),
    )  # fmt: skip
    metadata, width = case.metadata, -(-400 // block_size)
    shape = (4 * width, num_heads, block_size, head_dim)
    out_k, out_v = torch.full((2, *shape), float("nan"), device=DEVICE, dtype=dtype)
    tables = torch.full((6, width), -1, dtype=torch.int32, device=DEVICE)
    keys, values = case.kv.k.view(torch.int16), case.kv.v.view(torch.int16)
    widen_kv(keys, values, metadata, out_k, out_v, tables)
    for row, (_, context) in enumerate(rows):
        num_blocks = -(-context // block_size) if row >= 2 else 0
        assert tables[row, num_blocks:].eq(-1).all()  # a decode row has no copy
        for block in range(num_blocks):
            count = min(block_size, context - block * block_size)
            source, target = metadata.block_tables[row, block].item(), tables[row, block].item()
            for narrow, wide in ((case.kv.k, out_k), (case.kv.v, out_v)):
                copied = wide[target, :, :count].transpose(0, 1).float() * 256
                assert torch.equal(copied, narrow[source, :count].float())
                assert wide[target, :, count:].isnan().all()
    assert len(tables[tables >= 0].unique()) == sum(-(-c // block_size) for _, c in rows[2:])


@on_device
def test_too_many_blocks_are_refused(monkeypatch):
    """The buffer is allocated nevertheless: an engine measures memory at such a step."""
    case = step([(2, 130), (3, 3)], device=DEVICE, heads=(2, 1), fp8=True, bounds=(3, 192))
    backend = TritonAttention(case.shape, "a test")
    keys, values = case.kv.k.view(torch.int16), case.kv.v.view(torch.int16)
    for room, fits in ((5, False), (6, True)):  # 2 rows of up to 3 blocks
        monkeypatch.setattr(triton, "WIDENED_BYTES", room * 2 * 2 * 64 * 64)
        backend.buffers.tensors.clear()
        widened = backend._widen(keys, values, case.metadata, torch.bfloat16)
        assert backend.buffers.tensors["widened", 2 * room * 64 * 64].dtype == torch.bfloat16
        assert (widened is not None) == fits
    wide_k, _, tables = widened
    block = tables[0, 2].item()
    first = case.metadata.block_tables[0, 2].item()
    assert torch.equal(wide_k[block, :2].float() * 256, case.kv.k[first, :2].float())


@outer_only
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles_ahead_of_time(capability):
    types = dict.fromkeys(["k_ptr", "v_ptr"], "*i16") | {
        "block_tables_ptr": "*i32", "context_lens_ptr": "*i32", "out_k_ptr": "*bf16",
        "out_v_ptr": "*bf16", "out_tables_ptr": "*i32", "table_stride": "i32", "first_row": "i32",
        "width": "i32",
    }  # fmt: skip
    constants = {
        "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "PAIRS": 64, "BLOCK_SIZE": 256, "TILE": 64,
        "KV_BLOCK": 131072, "KV_TOKEN": 64, "KV_HEAD": 16384, "PDL": capability >= 90,
    }  # fmt: skip
    pointers = [name for name in types if name.endswith("ptr")]
    assert_fits(compile_for(widen_kv_kernel, types, constants, capability, pointers), capability)
