"""A decode step's inputs from the device's rows, and its tokens back into them."""

import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels import DecodeRows, RowTables, TokenRing, reference
from nv_kernels.step import triton_rows as rows

PADDING = 7
BLOCK = 16


def tables(device: str, width: int = 70) -> RowTables:
    generator = torch.Generator().manual_seed(1)

    def integers(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, dtype=dtype).to(device)

    return RowTables(
        last_token=integers(1000, PADDING + 1),
        computed=torch.tensor([0, 15, 16, 31, 500, width * BLOCK - 1, 3, 0], dtype=torch.int32).to(
            device
        ),
        block_table=integers(2**20, PADDING + 1, width, dtype=torch.int32),
        floats=torch.rand(PADDING + 1, 3, generator=generator).to(device),
        integers=integers(2**40, PADDING + 1, 3) * torch.tensor([0, -1, 1], device=device)
        + torch.tensor([5, 0, 0], device=device),
    )


def check(read: DecodeRows, before: RowTables, after: RowTables, slots: list[int]) -> None:
    """What the definition says, row by row, in plain Python."""
    for row, slot in enumerate(slots):
        computed = int(before.computed[slot])
        assert int(read.token_ids[row]) == int(before.last_token[slot])
        assert int(read.positions[row]) == computed
        assert int(read.lengths[row]) == computed + 1
        assert read.temperature[row] == before.floats[slot, 0]
        assert read.top_p[row] == before.floats[slot, 1]
        assert read.min_p[row] == before.floats[slot, 2]
        assert int(read.top_k[row]) == int(before.integers[slot, 0])
        assert int(read.seeds[row]) == int(before.integers[slot, 1])
        if slot == PADDING:
            assert (int(read.context_lens[row]), int(read.slot_mapping[row])) == (0, -1)
            assert int(after.computed[slot]) == computed
            continue
        assert int(read.context_lens[row]) == int(after.computed[slot]) == computed + 1
        used = computed // BLOCK + 1
        assert torch.equal(read.block_tables[row, :used], before.block_table[slot, :used])
        place = int(before.block_table[slot, computed // BLOCK]) * BLOCK + computed % BLOCK
        assert int(read.slot_mapping[row]) == place


SLOTS = [4, 0, 3, 2, 5, 1, PADDING, PADDING]


def test_definition() -> None:
    state, before = tables("cpu"), tables("cpu")
    read = reference.decode_rows(torch.tensor(SLOTS), state, BLOCK, PADDING)
    check(read, before, state, SLOTS)
    assert int(state.computed[6]) == 3  # not among the rows


@outer_only
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


@on_device
@pytest.mark.parametrize("slots", [SLOTS, [5], [PADDING]])
def test_decode_rows(slots) -> None:
    state, before = tables(DEVICE), tables(DEVICE)
    read = rows.decode_rows(torch.tensor(slots, device=DEVICE), state, BLOCK, PADDING)
    check(read, before, state, slots)


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
    assert last_token.tolist() == [3, 0, 0, 0]  # what the row reads next must be a token
    assert ring.entries[0].tolist() == [-1, 3, 0]


@outer_only
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles(capability) -> None:
    pointers = {
        "slots_ptr": "*i64", "last_token_ptr": "*i64", "computed_ptr": "*i32", "table_ptr": "*i32",
        "floats_ptr": "*fp32", "integers_ptr": "*i64", "token_ids_ptr": "*i64",
        "positions_ptr": "*i64", "lengths_ptr": "*i64", "slot_mapping_ptr": "*i64",
        "context_lens_ptr": "*i32", "tables_ptr": "*i32", "temperature_ptr": "*fp32",
        "top_p_ptr": "*fp32", "min_p_ptr": "*fp32", "top_k_ptr": "*i32", "seeds_ptr": "*i64",
        "width": "i32", "padding": "i32",
    }  # fmt: skip
    constants = {"PAGE": 256, "CHUNK": 64, "PDL": capability >= 90}
    compiled = compile_for(rows.decode_rows_kernel, pointers, constants, capability, num_warps=1)
    assert_fits(compiled, capability)
    pointers = {
        "token_ids_ptr": "*i64", "slots_ptr": "*i64", "last_token_ptr": "*i64",
        "entries_ptr": "*i64", "count_ptr": "*i64",
        "num_rows": "i32", "num_entries": "i32", "width": "i32",
    }  # fmt: skip
    constants = {"RING": True, "CHUNK": 512, "PDL": capability >= 90}
    compiled = compile_for(rows.keep_tokens_kernel, pointers, constants, capability)
    assert_fits(compiled, capability)
