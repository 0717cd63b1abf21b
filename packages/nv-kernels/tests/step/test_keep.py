"""A step's tokens are stored in the device's rows and in the ring."""

import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels import TokenRing, reference
from nv_kernels.step import triton_keep as rows


@outer_only
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


@on_device
@pytest.mark.parametrize("number", [1, 6])
def test_keep_tokens_in_a_ring(number) -> None:
    last_token = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    entries = torch.zeros(3, 6, dtype=torch.int64, pin_memory=not INTERPRETING)
    ring = TokenRing(entries, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    slots = torch.tensor([6, 2, 1, 0, 5, 3][:number], device=DEVICE)
    for step in range(5):
        ids = torch.arange(number, device=DEVICE) + 10 * step
        rows.keep_tokens(ids, slots, last_token, ring)
        if not INTERPRETING:
            torch.cuda.synchronize()
        assert entries[step % 3, :number].tolist() == ids.tolist()
        assert last_token[slots].tolist() == ids.tolist()
    assert int(ring.count) == 5
    rows.keep_tokens(ids + 1, slots, last_token)
    assert last_token[slots].tolist() == (ids + 1).tolist()
    assert int(ring.count) == 5
    ids[0] = -1
    rows.keep_tokens(ids, slots, last_token, ring)
    if not INTERPRETING:
        torch.cuda.synchronize()
    assert entries[5 % 3, :number].tolist() == ids.tolist()
    assert last_token[slots].tolist() == ids.clamp(min=0).tolist()


def test_definition_of_the_ring() -> None:
    last_token, ids = torch.zeros(4, dtype=torch.int64), torch.tensor([5, 9])
    ring = TokenRing(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3]))
    reference.keep_tokens(ids, torch.tensor([2, 0]), last_token, ring)
    assert last_token.tolist() == [9, 0, 5, 0]
    assert (ring.entries.tolist(), int(ring.count)) == ([[0, 0, 0], [5, 9, 0]], 4)
    reference.keep_tokens(torch.tensor([-1, 3]), torch.tensor([2, 0]), last_token, ring)
    assert last_token.tolist() == [3, 0, 0, 0]  # the row's next input must be a token
    assert ring.entries[0].tolist() == [-1, 3, 0]


@outer_only
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles(capability) -> None:
    pointers = {
        "token_ids_ptr": "*i64", "slots_ptr": "*i64", "last_token_ptr": "*i64",
        "entries_ptr": "*i64", "count_ptr": "*i64",
        "num_rows": "i32", "num_entries": "i32", "width": "i32",
    }  # fmt: skip
    constants = {"RING": True, "CHUNK": 512, "PDL": capability >= 90}
    compiled = compile_for(rows.keep_tokens_kernel, pointers, constants, capability)
    assert_fits(compiled, capability)
