"""Rows past the last sequence's become zero, and no others change."""

import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels.attention.triton.zero_tail import BLOCK, PROGRAMS, zero_tail, zero_tail_kernel


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 2, 64), (7, 14, 80), (PROGRAMS + 9, 1, 8), (0, 2, 64)])
def test_zeroes_from_a_row_on(shape, dtype):
    for first in {0, shape[0] // 2, shape[0]}:
        out = torch.randn(shape, device=DEVICE).to(dtype)
        out[first:] = float("nan")
        kept = out[:first].clone()
        zero_tail(out, torch.tensor([9, first], dtype=torch.int32, device=DEVICE)[-1])
        assert torch.equal(out[:first], kept)
        assert torch.equal(out[first:], torch.zeros_like(out[first:]))


@pytest.mark.skipif(INTERPRETING, reason="compiles")
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles_for_cards_that_are_not_there(capability):
    types = {"out_ptr": "*bf16", "first_ptr": "*i32", "num_rows": "i32"}
    constants = {"WIDTH": 2048, "PROGRAMS": PROGRAMS, "BLOCK": BLOCK, "PDL": capability >= 90}
    compiled = compile_for(zero_tail_kernel, types, constants, capability, divisible=["out_ptr"])
    assert_fits(compiled, capability)
