"""Log-probabilities and the most likely tokens: the kernels against the definition."""

import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels import compile_ahead, reference
from nv_kernels.sampling import triton_top_logprobs as kernels

INF = float("inf")
VOCABULARIES = (7, 331, 4224) if INTERPRETING else (7, 331, 4224, 151_936)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module", autouse=True)
def kernels_compiled():
    """Compile most kernels of this file's tests, several at a time."""
    if INTERPRETING or not torch.cuda.is_available():
        return
    with compile_ahead():
        for size in VOCABULARIES:
            for dtype in DTYPES:
                logits = torch.zeros(2, size, dtype=dtype, device=DEVICE)
                ids = torch.zeros(2, dtype=torch.int64, device=DEVICE)
                kernels.top_logprobs(logits, ids, 1)


def some_logits(rows, vocabulary, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, vocabulary, generator=generator)).to(dtype)


def assert_equal(logits, ids, num):
    """Assert equal ids and ranks, ties included, and log-probabilities equal up to rounding."""
    got = kernels.top_logprobs(logits.to(DEVICE), ids.to(DEVICE), num)
    expected = reference.top_logprobs(logits, ids, num)
    assert [part.dtype for part in got] == [torch.int64, torch.float32, torch.int64]
    assert torch.equal(got[0].cpu(), expected[0])
    assert torch.equal(got[2].cpu(), expected[2])
    torch.testing.assert_close(got[1].cpu(), expected[1], atol=1e-5, rtol=1e-6)


def test_definition():
    """By hand, and by torch: the own token first, ties by id, ranks shared."""
    logits = torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0, -5.0]])
    ids, logprobs, ranks = reference.top_logprobs(logits.repeat(3, 1), torch.tensor([3, 4, 5]), 5)
    assert ids.tolist() == [[own, 1, 3, 0, 2, 4] for own in (3, 4, 5)]
    assert ranks.tolist() == [1, 4, 6]
    torch.testing.assert_close(logprobs[0], logits.log_softmax(-1)[0, ids[0]])
    logits = some_logits(5, 100)  # bf16: many are equal
    ids, logprobs, _ = reference.top_logprobs(logits, torch.arange(5), 100)
    assert torch.equal(ids[:, 1:], logits.sort(descending=True, stable=True).indices)
    torch.testing.assert_close(logprobs, logits.float().log_softmax(-1).gather(1, ids))
    for row in range(5):
        alone = reference.top_logprobs(logits[row : row + 1], torch.tensor([row]), 4)
        assert torch.equal(alone[0][0], ids[row, :5])
        assert torch.equal(alone[1][0], logprobs[row, :5])
    ids, logprobs, _ = reference.top_logprobs(logits, torch.arange(5), 0)
    assert (ids.shape, logprobs.shape) == ((5, 1), (5, 1))


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


@on_device
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("num", [0, 1, 5, 33])
def test_top_logprobs(vocabulary, num):
    rows = 4 if INTERPRETING else 16
    num = min(num, vocabulary)
    for dtype in DTYPES:
        logits = some_logits(rows, vocabulary, dtype)
        assert_equal(logits, torch.arange(rows) * 5 % vocabulary, num)


@on_device
def test_ties_in_tiles_and_across_them():
    logits = torch.full((3, 700), -2.0)
    logits[0, [699, 5, 6, 127, 128, 300]] = 1.0
    logits[0, [301, 302]] = 4.0
    logits[1] = 0.0
    logits[1, ::2] = -0.0
    logits[2] = -INF
    logits[2, [650, 3]] = torch.tensor([1.0, 2.0])
    assert_equal(logits.bfloat16(), torch.tensor([300, 600, 650]), 40)
    top_ids, logprobs, ranks = kernels.top_logprobs(
        logits.to(DEVICE), torch.tensor([5, 1, 0], device=DEVICE), 4
    )
    assert top_ids[2].tolist() == [0, 3, 650, 0, 1]
    assert logprobs[2, [0, 3, 4]].tolist() == [-INF] * 3
    assert ranks.tolist() == [3, 1, 3]


@on_device
def test_many_come_from_a_sort_with_the_same_bits():
    logits = some_logits(3, 600).to(DEVICE)
    ids = torch.tensor([1, 599, 44], device=DEVICE)
    few, many = (kernels.top_logprobs(logits, ids, num) for num in (kernels.MOST, 600))
    assert torch.equal(many[0][:, : kernels.MOST + 1], few[0])
    assert torch.equal(many[1][:, : kernels.MOST + 1], few[1])
    assert_equal(logits.cpu(), ids.cpu(), 600)


@on_device
def test_a_row_depends_on_its_logits_alone():
    wide = some_logits(9, 4240).to(DEVICE)
    logits = wide[:, :4224]
    ids = torch.arange(9, device=DEVICE) * 400
    together = kernels.top_logprobs(logits, ids, 6)
    for row in range(9):
        alone = kernels.top_logprobs(logits[row : row + 1].clone(), ids[row : row + 1], 3)
        assert torch.equal(alone[0][0], together[0][row, :4])
        assert torch.equal(alone[1][0], together[1][row, :4])
        assert torch.equal(alone[2][0], together[2][row])
    none = kernels.top_logprobs(logits[:0], ids[:0], 3)
    assert [tuple(part.shape) for part in none] == [(0, 4), (0, 4), (0,)]


@on_device
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from the interpreter's NumPy
@pytest.mark.parametrize("bad", [-INF, float("nan"), INF])
def test_rows_without_a_distribution_still_give_tokens(bad):
    logits = some_logits(2, 300).to(DEVICE)
    logits[1, 7] = bad
    if bad == -INF:
        logits[1] = bad
    ids, logprobs, _ = kernels.top_logprobs(logits, torch.tensor([5, 9], device=DEVICE), 4)
    assert ((ids >= 0) & (ids < 300)).all()
    assert logprobs[0].isfinite().all()
    assert not logprobs[1].isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETING, reason="a graph needs a card")
def test_in_a_cuda_graph():
    logits, ids = some_logits(8, 4224).to(DEVICE), torch.arange(8, device=DEVICE)
    kernels.top_logprobs(logits, ids, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.top_logprobs(logits, ids, 5)
    logits.copy_(some_logits(8, 4224, seed=3))
    ids.add_(9)
    graph.replay()
    for got, expected in zip(captured, kernels.top_logprobs(logits, ids, 5), strict=True):
        assert torch.equal(got, expected)


TYPES = {
    "logits": "*bf16", "token_ids": "*i64", "tile_key": "*i32", "group_max": "*fp32",
    "group_mass": "*fp32", "group_above": "*i32", "top_ids": "*i64", "logprobs": "*fp32",
    "ranks": "*i64", "norms": "*fp32",
    "stride": "i32", "V": "i32", "num_groups": "i32", "num_logprobs": "i32",
}  # fmt: skip


@outer_only
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("name", ["logit_statistics_kernel", "top_kernel"])
def test_compiles_ahead_of_time(name, dtype, capability):
    kernel = getattr(kernels, name)
    constants = {"TILE": 128, "GROUPS": 64, "TILES": 2048, "PDL": capability >= 90}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = {key: kind for key, kind in TYPES.items() if key in kernel.arg_names}
    types["logits"] = dtype
    divisible = [key for key, kind in types.items() if kind[0] == "*" or key in {"stride", "V"}]
    compiled = compile_for(kernel, types, constants, capability, divisible=divisible, num_warps=4)
    assert_fits(compiled, capability)
