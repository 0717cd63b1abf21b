"""The inputs of a step, from the device's rows and the host's tensors."""

import random
from dataclasses import dataclass, replace
from itertools import takewhile

import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from interpreter import DEVICE, on_device, outer_only, run_interpreted
from nv_kernels import FROM_SLOT, RowTables, StepRows, reference
from nv_kernels.launch.ahead import compile_ahead
from nv_kernels.step import triton_rows


@dataclass(frozen=True)
class Row:
    """A row of a step: its slot (None: padding), where it starts, how many tokens."""

    slot: int | None
    start: int
    num_tokens: int
    from_slot: bool = False


@dataclass(frozen=True)
class Case:
    """A step and the size of its tables."""

    rows: tuple[Row, ...]
    spare_tokens: int = 0
    block_size: int = 16
    num_slots: int = 12
    width: int = 20

    @property
    def sizes(self) -> dict[str, int]:
        decodes = takewhile(lambda row: row.num_tokens == 1, self.rows)
        return {
            "num_decodes": len(list(decodes)),
            "block_size": self.block_size,
            "padding": self.num_slots,
        }


CASES = {
    "tokens of slots": Case((Row(3, 17, 1, True), Row(0, 0, 1, True), Row(5, 15, 1, True))),
    "a prompt": Case((Row(2, 0, 77),)),
    "a chunk at a block's end": Case((Row(2, 16, 16), Row(1, 15, 2), Row(4, 31, 1))),
    "mixed": Case((Row(7, 300, 1, True), Row(1, 8, 1), Row(4, 33, 60), Row(9, 0, 2))),
    "all kinds of padding": Case(
        (
            Row(7, 300, 1, True),
            Row(None, 0, 1),
            Row(None, 0, 1),
            Row(4, 33, 140),
            Row(9, 0, 5),
            Row(None, 0, 0),
            Row(None, 0, 0),
        ),
        spare_tokens=131,
    ),
    "padding from its slot": Case((Row(None, 0, 1, True), Row(3, 5, 1, True))),
    "only padding": Case((Row(None, 0, 0),) * 4, spare_tokens=64),
    "no decodes": Case((*(Row(None, 0, 1),) * 8, Row(None, 0, 0)), spare_tokens=3),
    "odd blocks": Case((Row(1, 7, 30), Row(0, 50, 1, True)), block_size=3),
    "wide tables": Case((Row(1, 1500, 1, True), Row(0, 1000, 300)), width=130),
    "large blocks": Case((Row(1, 1500, 300), Row(0, 255, 2)), block_size=256),
    "many rows": Case(
        (
            *(Row(slot, 3 * slot, 1, True) for slot in range(37)),
            *(Row(slot, 0, 9) for slot in range(40, 60)),
        ),
        num_slots=64,
    ),
}


def random_case(seed: int) -> Case:
    """Rows of one token, padding among them, then longer ones, then padding."""
    chance = random.Random(seed)
    slots = chance.sample(range(12), 12)
    block_size, width = chance.choice([1, 16, 17, 64]), chance.choice([9, 24])
    room = block_size * width
    singles = [
        Row(slots.pop(), chance.randrange(room), 1, chance.random() < 0.7)
        for _ in range(chance.randrange(6))
    ]
    singles += [Row(None, 0, 1)] * chance.randrange(4)
    longer = []
    for _ in range(chance.randrange(1, 6)):
        start = chance.randrange(room)
        longer.append(Row(slots.pop(), start, chance.randint(1, room - start)))
    longer += [Row(None, 0, 0)] * chance.randrange(4)
    return Case((*singles, *longer), chance.choice([0, 1, 127, 128, 200]), block_size, 12, width)


def tables_of(case: Case, device: str) -> RowTables:
    generator = torch.Generator().manual_seed(1)
    num_rows = case.num_slots + 1

    def integers(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, dtype=dtype)

    computed = integers(case.width * case.block_size, num_rows, dtype=torch.int32)
    computed[-1] = 0
    for row in case.rows:
        if row.from_slot and row.slot is not None:
            computed[row.slot] = row.start
    return RowTables(
        last_token=integers(1000, num_rows).to(device),
        computed=computed.to(device),
        block_table=integers(2**30, num_rows, case.width, dtype=torch.int32).to(device),
        floats=torch.rand(num_rows, 3, generator=generator).to(device),
        integers=torch.stack(
            [integers(2**31, num_rows), integers(2**62, num_rows) * -2, integers(9, num_rows)], 1
        ).to(device),
    )


def step_of(case: Case, device: str) -> tuple[torch.Tensor, ...]:
    """token_ids, slots, starts and query_start, as views of one tensor."""
    token_ids, slots, starts, query_start = [], [], [], [0]
    for row in case.rows:
        first = 2000 + len(token_ids)
        token_ids += [FROM_SLOT] if row.from_slot else range(first, first + row.num_tokens)
        slots.append(case.num_slots if row.slot is None else row.slot)
        starts.append(FROM_SLOT if row.from_slot else row.start)
        query_start.append(query_start[-1] + row.num_tokens)
    columns = [token_ids + [0] * case.spare_tokens, slots, starts, query_start]
    packed = torch.tensor([value for column in columns for value in column], device=device)
    return packed.split([len(column) for column in columns])


def check(read: StepRows, before: RowTables, after: RowTables, case: Case) -> None:
    """The definition, row by row, in plain Python."""
    token, padding = 0, case.num_slots
    computed = before.computed.tolist()
    assert int(read.query_start[0]) == 0
    for index, row in enumerate(case.rows):
        slot = padding if row.slot is None else row.slot
        length = row.start + row.num_tokens
        for offset in range(row.num_tokens):
            position = row.start + offset
            token_id = int(before.last_token[slot]) if row.from_slot else 2000 + token
            block = int(before.block_table[slot, position // case.block_size])
            place = -1 if slot == padding else block * case.block_size + position % case.block_size
            assert int(read.token_ids[token]) == token_id
            assert int(read.positions[token]) == position
            assert int(read.slot_mapping[token]) == place
            token += 1
        assert int(read.query_start[index + 1]) == token
        assert int(read.lengths[index]) == length
        assert int(read.last[index]) == max(token - 1, 0)
        assert int(read.context_lens[index]) == (0 if slot == padding else length)
        used = 0 if slot == padding else -(-length // case.block_size)
        used = max(used, 1)  # a row without context has a block too
        assert torch.equal(read.block_tables[index, :used], before.block_table[slot, :used])
        floats = (read.temperature[index], read.top_p[index], read.min_p[index])
        assert torch.equal(torch.stack(floats), before.floats[slot])
        integers = [int(read.top_k[index]), int(read.seeds[index])]
        assert integers == before.integers[slot, :2].tolist()
        computed[slot] = computed[slot] if slot == padding else length
    assert after.computed.tolist() == computed
    assert (read.token_ids[token:] == 0).all()
    assert (read.positions[token:] == 0).all()
    assert (read.slot_mapping[token:] == -1).all()


def assert_same(got: StepRows, want: StepRows) -> None:
    for name, mine, theirs in zip(StepRows._fields, got, want, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
        if name != "block_tables":  # parts of it are undefined
            assert torch.equal(mine.cpu(), theirs.cpu()), name


@pytest.mark.parametrize("name", CASES)
def test_definition(name) -> None:
    case = CASES[name]
    state, before = tables_of(case, "cpu"), tables_of(case, "cpu")
    read = reference.step_rows(*step_of(case, "cpu"), state, **case.sizes)
    check(read, before, state, case)


@outer_only
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


@on_device
@pytest.mark.parametrize("case", [*CASES.values(), *map(random_case, range(30))])
def test_kernels(case) -> None:
    state, before, other = (tables_of(case, DEVICE) for _ in range(3))
    step = step_of(case, DEVICE)
    read = triton_rows.step_rows(*step, state, **case.sizes)
    check(StepRows(*(part.cpu() for part in read)), cpu(before), cpu(state), case)
    want = reference.step_rows(*step, other, **case.sizes)
    assert_same(read, want)
    assert torch.equal(state.computed, other.computed)


def cpu(tables: RowTables) -> RowTables:
    return replace(tables, **{name: value.cpu() for name, value in vars(tables).items()})


@pytest.mark.gpu
def test_a_step_of_full_size() -> None:
    rows = [Row(slot, 16000 + slot % 300, 1, True) for slot in range(1000)]
    rows += [Row(1000 + index, 100 * index, 4000) for index in range(18)]
    case = Case((*rows, *(Row(None, 0, 0),) * 6), 500, 16, 1024, 1024)
    state, other = tables_of(case, DEVICE), tables_of(case, DEVICE)
    step = step_of(case, DEVICE)
    assert step[0].shape[0] > 65_536
    read = triton_rows.step_rows(*step, state, **case.sizes)
    want = reference.step_rows(*step, other, **case.sizes)
    assert_same(read, want)
    assert torch.equal(state.computed, other.computed)


@pytest.mark.gpu
def test_a_graph_repeats_it() -> None:
    first, second = CASES["mixed"], CASES["all kinds of padding"]
    singles = (*first.rows[:2], Row(None, 0, 1))  # as many as `second` has
    room = replace(second, rows=(*singles, *first.rows[2:], *(Row(None, 0, 0),) * 2))
    room = replace(room, spare_tokens=len(step_of(second, "cpu")[0]) - 65)
    state = tables_of(second, DEVICE)
    step = step_of(second, DEVICE)
    triton_rows.step_rows(*step, state, **second.sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read = triton_rows.step_rows(*step, state, **second.sizes)
    for case in (second, room, second):
        for part, values in zip(step, step_of(case, DEVICE), strict=True):
            part.copy_(values)
        before = tables_of(case, DEVICE)
        for name, values in vars(before).items():
            vars(state)[name].copy_(values)
        graph.replay()
        torch.cuda.synchronize()
        check(StepRows(*(part.cpu() for part in read)), cpu(before), cpu(state), case)


@pytest.mark.gpu
def test_what_torch_uses_as_an_index_is_zero_where_nothing_is_launched() -> None:
    case = CASES["mixed"]
    step, state = step_of(case, DEVICE), tables_of(case, DEVICE)
    used = torch.full((len(step[0]) + len(step[1]),), -1, device=DEVICE)
    del used  # the next tensors reuse its memory
    with compile_ahead():
        read = triton_rows.step_rows(*step, state, **case.sizes)
    assert not read.token_ids.any()
    assert not read.last.any()


@outer_only
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles(capability) -> None:
    pointers = {
        "token_ids_ptr": "*i64", "slots_ptr": "*i64", "starts_ptr": "*i64",
        "query_start_ptr": "*i64", "last_token_ptr": "*i64", "computed_ptr": "*i32",
        "table_ptr": "*i32", "floats_ptr": "*fp32", "integers_ptr": "*i64",
        "read_ids_ptr": "*i64", "positions_ptr": "*i64", "slot_mapping_ptr": "*i64",
        "read_start_ptr": "*i32", "lengths_ptr": "*i64", "last_ptr": "*i64",
        "context_lens_ptr": "*i32", "tables_ptr": "*i32", "temperature_ptr": "*fp32",
        "top_p_ptr": "*fp32", "min_p_ptr": "*fp32", "top_k_ptr": "*i32", "seeds_ptr": "*i64",
        "num_decodes": "i32", "width": "i32", "padding": "i32",
    }  # fmt: skip
    constants = {"BLOCK_SIZE": 256, "CHUNK": 64, "PDL": capability >= 90}
    kernel = triton_rows.step_rows_kernel
    assert_fits(compile_for(kernel, pointers, constants, capability, num_warps=1), capability)
    pointers = {
        "token_ids_ptr": "*i64", "slots_ptr": "*i64", "query_start_ptr": "*i64",
        "lengths_ptr": "*i64", "last_token_ptr": "*i64", "table_ptr": "*i32",
        "read_ids_ptr": "*i64", "positions_ptr": "*i64", "slot_mapping_ptr": "*i64",
        "num_decodes": "i32", "num_tokens": "i32", "num_rows": "i32", "width": "i32",
        "padding": "i32",
    }  # fmt: skip
    constants = {
        "BLOCK_SIZE": 16, "TOKENS": triton_rows.PROGRAM_TOKENS, "PDL": capability >= 90,
    }  # fmt: skip
    compiled = compile_for(triton_rows.step_tokens_kernel, pointers, constants, capability)
    assert_fits(compiled, capability)
