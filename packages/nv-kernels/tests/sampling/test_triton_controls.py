"""Controls of the logits: the kernels against the definition, bit for bit."""

import random

import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels import LogitControls, compile_ahead, reference
from nv_kernels.sampling import triton_controls as controls
from nv_kernels.sampling.controls import ANY

NUM_SLOTS = 9
VOCABULARIES = (331, 4128) if INTERPRETING else (331, 4128, 151_936)
GROUPS = {
    "masks": ("masks",),
    "allowed": ("allowed",),
    "words": ("words", "recent"),
    "stops": ("stop_ids", "min_lengths"),
    "bias": ("bias_ids", "bias_values"),
    "penalties": ("repetition", "additive", "counts"),
}
ASKED = [
    (),
    *((name,) for name in GROUPS),
    ("bias", "penalties"),
    ("masks", "bias", "words"),
    tuple(GROUPS),
]


@pytest.fixture(scope="module", autouse=True)
def kernels_compiled():
    """Compile most kernels of this file's tests, several at a time."""
    if INTERPRETING or not torch.cuda.is_available():
        return
    slots = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with compile_ahead():
        for size in VOCABULARIES:
            stops = {"stop_ids": slots[:, None], "min_lengths": slots}
            logits = torch.zeros(2, size, dtype=torch.bfloat16, device=DEVICE)
            controls.shape_logits(logits, LogitControls(slots, slots, **stops))


def every_table(vocabulary, rows=6, seed=0):
    """Make tables of `rows` slots and the neutral row; slot 0 has no controls."""
    rng = torch.Generator().manual_seed(seed)

    def integers(high, *shape):
        return torch.randint(high, shape, generator=rng)

    shape = (rows + 1, vocabulary)
    tables = {
        "masks": integers(2**32, rows + 1, -(-vocabulary // 32)).int(),
        "allowed": torch.rand(shape, generator=rng) < 0.7,
        "words": integers(5, rows + 1, 150, 3),
        "recent": integers(5, rows + 1, 2),
        "stop_ids": integers(vocabulary, NUM_SLOTS + 1, 18),
        "min_lengths": (integers(10, NUM_SLOTS + 1, 3) * torch.tensor([1, 0, 1]))[:, 2],
        "bias_ids": torch.stack([
            torch.randperm(vocabulary, generator=rng)[:140] for _ in range(rows + 1)
        ]),
        "bias_values": 4 * torch.randn(rows + 1, 140, generator=rng),
        "repetition": 0.5 + torch.rand(rows + 1, generator=rng),
        "additive": torch.randn(rows + 1, 2, generator=rng),
        "counts": integers(7, *shape).int() * (integers(3, *shape) == 0).int(),
    }  # fmt: skip
    tables["words"][:, ::2, 2] = ANY
    tables["words"][:, ::3, 1:] = ANY
    tables["words"][:, ::5] = ANY
    tables["recent"][2, 1:] = ANY
    tables["bias_ids"][3, 20:], tables["bias_values"][3, 20:] = ANY, 0.0
    tables["additive"][4] = 0.0
    tables["repetition"][5] = 1.0
    neutral = {"masks": -1, "allowed": True, "words": ANY, "recent": ANY, "min_lengths": 0,
               "bias_ids": ANY, "bias_values": 0.0, "repetition": 1.0, "additive": 0.0}  # fmt: skip
    for name, value in neutral.items():
        tables[name][0] = tables[name][-1] = value
    return tables


def some_logits(rows, vocabulary, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(rows)
    logits = (3 * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
    logits[:, ::17] = 0.0
    logits[1:2, ::7] = -torch.inf
    return logits


def check(asked, vocabulary, dtype=torch.bfloat16, slots=(3, 0, 5, 1, NUM_SLOTS, 2, 4, 7)):
    """Choose slots with a row in a table, and slots without one, such as the padding's."""
    tables = every_table(vocabulary)
    tables = {name: tables[name] for group in asked for name in GROUPS[group]}
    logits = some_logits(len(slots), vocabulary, dtype)
    where = {"slots": torch.tensor(slots), "lengths": torch.arange(len(slots))}
    expected = reference.shape_logits(logits, LogitControls(**where, **tables))
    on_device = {name: each.to(DEVICE) for name, each in (where | tables).items()}
    if "min_lengths" in on_device:  # a column of a wider table, as the engine's is
        columns = on_device["min_lengths"][:, None].repeat(1, 3)
        on_device["min_lengths"] = columns[:, 2]
    raw = logits.to(DEVICE)
    got = controls.shape_logits(raw, LogitControls(**on_device))
    assert got.dtype == torch.float32
    assert torch.equal(got.cpu(), expected)
    assert torch.equal(raw.cpu(), logits)
    for row, slot in enumerate(slots):
        if slot in {0, NUM_SLOTS}:
            assert torch.equal(got[row].cpu(), logits[row].float())


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


@on_device
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_controls(asked, vocabulary):
    check(asked, vocabulary)


@on_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes(dtype):
    check(tuple(GROUPS), VOCABULARIES[-1], dtype)


@on_device
def test_a_row_does_not_depend_on_the_others_nor_on_where_its_logits_lie():
    tables = {name: each.to(DEVICE) for name, each in every_table(700).items()}
    slots = random.Random(0).sample(range(NUM_SLOTS), NUM_SLOTS)
    wide = some_logits(NUM_SLOTS, 704).to(DEVICE)
    lengths = torch.arange(NUM_SLOTS, device=DEVICE)
    rows = torch.tensor(slots, device=DEVICE)
    together = controls.shape_logits(
        wide[:, :700], LogitControls(slots=rows, lengths=lengths, **tables)
    )
    for row in range(NUM_SLOTS):
        part = slice(row, row + 1)
        where = LogitControls(slots=rows[part], lengths=lengths[part], **tables)
        assert torch.equal(controls.shape_logits(wide[part, :700], where), together[part])
    none = LogitControls(slots=rows[:0], lengths=lengths[:0], **tables)
    assert controls.shape_logits(wide[:0, :700], none).shape == (0, 700)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETING, reason="a graph needs a card")
def test_in_a_cuda_graph():
    tables = {name: each.to(DEVICE) for name, each in every_table(4128).items()}
    where = {"slots": torch.arange(8, device=DEVICE), "lengths": torch.arange(8, device=DEVICE)}
    given = LogitControls(**where, **tables)
    logits = some_logits(8, 4128).to(DEVICE)
    controls.shape_logits(logits, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        shaped = controls.shape_logits(logits, given)
    tables["counts"].add_(2)
    where["slots"].add_(1)
    logits.neg_()
    graph.replay()
    assert torch.equal(shaped, controls.shape_logits(logits, given))


POINTERS = {
    "logits": "*bf16", "shaped": "*fp32", "slots": "*i64", "lengths": "*i64", "masks": "*i32",
    "allowed": "*u8", "repetition": "*fp32", "additive": "*fp32", "counts": "*i32",
    "bias_ids": "*i64", "bias_values": "*fp32", "words": "*i64", "recent": "*i64",
    "stop_ids": "*i64", "min_lengths": "*i64",
}  # fmt: skip


@outer_only
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kernel", [controls.shape_kernel, controls.edit_kernel])
def test_compiles_ahead_of_time(kernel, capability):
    constants = {"CHUNK": controls.CHUNK, "BLOCK": controls.BLOCK, "PDL": capability >= 90}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {name: POINTERS.get(name, "i32") for name in kernel.arg_names if name not in constants}
    is_dense = kernel is controls.shape_kernel
    divisible = [*(name for name in types if name in POINTERS), *["stride", "V"] * is_dense]
    compiled = compile_for(
        kernel, types, constants, capability, divisible=divisible,
        num_warps=4 if is_dense else 1, enable_fp_fusion=False,
    )  # fmt: skip
    assert_fits(compiled, capability)
    assert not is_dense or "v4.b32" in compiled.ptx  # reads and writes 16 bytes per thread
