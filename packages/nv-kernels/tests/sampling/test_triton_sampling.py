"""The draw against its definition: same token, unless u lies within rounding of a boundary."""

import itertools
from dataclasses import replace

import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from draw_truth import assert_drawn, to_cpu
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels import SamplingTensors, compile_ahead, reference
from nv_kernels.sampling import triton_draw as draw
from nv_kernels.sampling import triton_filtering as filtering
from nv_kernels.sampling import triton_sample as sampling

INF = float("inf")
VOCABULARIES = (127, 700) if INTERPRETING else (127, 4097, 151_936)
ROWS = 6 if INTERPRETING else 64
# (temperature, top_k, top_p, min_p)
SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.7, 50, 1.0, 0.0),
    (1.5, 50, 0.9, 0.0),
    (1.0, 0, 0.9, 0.0),
    (2.5, 0, 0.5, 0.0),
    (1.0, 0, 1.0, 0.05),
    (0.8, 20, 0.95, 0.01),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 1000, 0.95, 0.0),
    (1.0, 10**6, 1.0, 0.0),
    (0.0, 5, 0.5, 0.1),
]


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module", autouse=True)
def kernels_compiled():
    """Compile all kernels of this file's tests, several at a time.

    Other vocabularies use the first one's kernels: one group, not a multiple of 16.
    """
    if INTERPRETING or not torch.cuda.is_available():
        return
    shapes = [(size, torch.bfloat16) for size in VOCABULARIES[:-1]]
    shapes += [(VOCABULARIES[-1], dtype) for dtype in DTYPES]
    with compile_ahead():
        for size, dtype in shapes:
            logits = torch.zeros(2, size, dtype=dtype, device=DEVICE)
            for setting in (SETTINGS[0], SETTINGS[2]):  # without filters, with filters
                sampling.sample(logits, params([setting] * 2))


def params(settings, first_position=0, seed=2**61 + 12345):
    temperature, top_k, top_p, min_p = zip(*settings, strict=True)
    rows = len(settings)
    return SamplingTensors(
        temperature=torch.tensor(temperature, device=DEVICE),
        top_k=torch.tensor(top_k, dtype=torch.int32, device=DEVICE),
        top_p=torch.tensor(top_p, device=DEVICE),
        min_p=torch.tensor(min_p, device=DEVICE),
        seeds=torch.arange(rows, device=DEVICE) * 7919 - seed,
        positions=torch.arange(rows, device=DEVICE) + first_position,
        any_filter=any(
            (k, p, m) != (0, 1.0, 0.0) for k, p, m in zip(top_k, top_p, min_p, strict=True)
        ),
    )


def some_logits(rows, vocabulary, dtype=torch.bfloat16, seed=0, scale=2.5):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocabulary, generator=generator) * scale).to(dtype).to(DEVICE)


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


@on_device
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_one_setting(setting, vocabulary):
    logits = some_logits(ROWS, vocabulary)
    settings = [setting] * ROWS
    tensors = params(settings)
    tokens = sampling.sample(logits, tensors)
    assert_drawn(logits, settings, tokens, tensors, most_different=1 + ROWS // 32)


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_rows(dtype):
    settings = SETTINGS * (1 if INTERPRETING else 16)
    logits = some_logits(len(settings), VOCABULARIES[-1], dtype, seed=1)
    tensors = params(settings, first_position=2**33 + 5)
    tokens = sampling.sample(logits, tensors)
    assert_drawn(logits, settings, tokens, tensors, most_different=1 + len(settings) // 32)


@on_device
@pytest.mark.parametrize("setting", [(1.0, 5, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (1.0, 0, 1.0, 0.3),
                                     (1.0, 4, 0.7, 0.1)])  # fmt: skip
def test_kept_set_is_exact(setting):
    """Over many draws the support equals the kept set of the sorted definition."""
    count = 16 if INTERPRETING else 4096
    row = torch.full((300,), -4.0)
    places = [3, 40, 130, 131, 200, 260, 299]
    row[places] = torch.tensor([2.0, 1.5, 2.0, 1.0, 1.5, 0.5, 1.25])  # ties at every border
    logits = row.to(torch.bfloat16).repeat(count, 1).to(DEVICE)
    tensors = params([setting] * count)
    tokens = sampling.sample(logits, tensors).cpu()
    expected = reference.sample(logits.cpu(), to_cpu(tensors))
    assert set(tokens.tolist()) == set(expected.tolist())
    assert (tokens != expected).sum() <= count // 1000


@on_device
def test_draw_does_not_depend_on_the_batch():
    settings = SETTINGS * (1 if INTERPRETING else 8)
    logits = some_logits(len(settings), VOCABULARIES[-1], seed=2)
    tensors = params(settings)
    together = sampling.sample(logits, tensors)
    for row in range(0, len(settings), 1 if INTERPRETING else 7):
        alone = SamplingTensors(
            **{name: getattr(tensors, name)[row : row + 1].clone() for name in
               ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")},
            any_filter=settings[row][1:] != (0, 1.0, 0.0),
        )  # fmt: skip
        assert torch.equal(sampling.sample(logits[row : row + 1], alone), together[row : row + 1])


@on_device
@pytest.mark.parametrize("setting", [SETTINGS[i] for i in (0, 1, 3, 4, 6)])
def test_minus_infinity_is_never_drawn(setting):
    logits = some_logits(ROWS, 600)
    allowed = torch.tensor([5, 130, 131, 599])
    masked = torch.full_like(logits, -INF)
    masked[:, allowed] = logits[:, allowed]
    tensors = params([setting] * ROWS)
    tokens = sampling.sample(masked, tensors)
    assert set(tokens.tolist()) <= set(allowed.tolist())
    assert_drawn(masked, [setting] * ROWS, tokens, tensors, most_different=1)


@on_device
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from the interpreter's NumPy
@pytest.mark.parametrize(
    ("setting", "dtype"), list(zip(SETTINGS, itertools.cycle(DTYPES), strict=False)), ids=str
)
def test_rows_without_a_token_to_draw_get_minus_1(setting, dtype):
    logits = some_logits(7, 4200, dtype)  # two groups
    logits[1] = -INF
    logits[2, 4100] = float("nan")
    logits[3] = float("nan")
    logits[4, 7] = INF
    logits[5, 4096:] = INF
    tensors = params([setting] * 7)
    tokens = sampling.sample(logits, tensors)
    assert tokens[1:6].tolist() == [-1] * 5
    whole = torch.tensor([0, 6], device=DEVICE)
    assert torch.equal(tokens[whole], sampling.sample(logits[whole], _rows(tensors, whole)))
    if setting[0] == 0:
        assert torch.equal(tokens[whole], logits[whole].argmax(-1))


def _rows(tensors, rows):
    fields = {name: value[rows] if isinstance(value, torch.Tensor) else value
              for name, value in vars(tensors).items()}  # fmt: skip
    return SamplingTensors(**fields)


@on_device
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("num_ids", [259] if INTERPRETING else [4096, 4099, 150_000])
def test_ids_past_the_bound_are_never_drawn(setting, num_ids):
    """Even if they are the likeliest, and even if their logits are NaN."""
    logits = some_logits(ROWS, num_ids + 253)
    logits[:, num_ids:] = 40.0
    logits[0, num_ids + 3] = float("nan")
    tensors = params([setting] * ROWS)
    tokens = sampling.sample(logits, replace(tensors, num_ids=num_ids))
    narrow = logits[:, :num_ids].contiguous()
    assert torch.equal(tokens, sampling.sample(narrow, tensors))
    if setting[0] == 0:
        assert torch.equal(tokens, narrow.argmax(-1))


@on_device
def test_top_p_drops_a_token_whose_mass_above_is_the_limit_itself():
    """Four logits in order whose exponentials are equal in fp32: each has mass 1/4 exactly."""
    count = 16 if INTERPRETING else 256
    logits = torch.tensor([0.0, -1e-9, -2e-9, -3e-9], device=DEVICE).repeat(count, 1)
    for top_p, kept in ((0.5, {0, 1}), (0.75, {0, 1, 2})):
        tokens = sampling.sample(logits, params([(1.0, 0, top_p, 0.0)] * count))
        assert set(tokens.tolist()) == kept


@on_device
def test_min_p_keeps_a_token_at_the_bound_itself():
    """At a temperature of log2(e) a logit of -1 is half as likely as one of 0, exactly."""
    count = 16 if INTERPRETING else 256
    logits = torch.full((count, 300), -INF, device=DEVICE)
    logits[:, 3], logits[:, 299] = 0.0, -1.0  # in two tiles: the mass of both must count
    setting = (1.4426950408889634, 0, 1.0, 0.5)
    assert set(sampling.sample(logits, params([setting] * count)).tolist()) == {3, 299}


@on_device
def test_strided_rows_and_empty_batches():
    wide = some_logits(ROWS, 701)
    logits = wide[:, :700]
    tensors = params([SETTINGS[3]] * ROWS)
    assert torch.equal(
        sampling.sample(logits, tensors), sampling.sample(logits.contiguous(), tensors)
    )
    greedy_rows = params([SETTINGS[1]] * ROWS)
    assert torch.equal(sampling.sample(logits, greedy_rows), logits.argmax(-1))
    assert sampling.sample(logits[:0], params([SETTINGS[0]])).shape == (0,)


@on_device
def test_greedy_takes_the_lowest_id_on_ties():
    logits = torch.zeros(2, 300, dtype=torch.bfloat16, device=DEVICE)
    logits[0, [130, 299]] = 3.0
    for any_filter in (False, True):
        tensors = replace(params([SETTINGS[1]] * 2), any_filter=any_filter)
        assert sampling.sample(logits, tensors).tolist() == [130, 0]


@on_device
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from the interpreter's NumPy
@pytest.mark.parametrize("any_filter", [False, True])
@pytest.mark.parametrize("past", [0, 253, 5000])  # the last one: a whole group past the ids
def test_greedy_finds_the_highest_logit_at_the_edges_of_tiles_and_groups(past, any_filter):
    """The last id is as high, in a group of its own: the lowest id is taken."""
    group = sampling.TILE * draw.GROUP.value
    num_ids = group + 9
    places = [0, sampling.TILE - 1, sampling.TILE, group - 1, group, num_ids - 1]
    logits = torch.full((len(places), num_ids + past), -3.0, device=DEVICE)
    logits[range(len(places)), places] = 2.0
    logits[:, num_ids - 1] = 2.0
    logits[:, num_ids:] = 40.0
    logits[::2, num_ids:] = float("nan")
    tensors = params([SETTINGS[1]] * len(places))
    tensors = replace(tensors, any_filter=any_filter, num_ids=num_ids if past else None)
    assert sampling.sample(logits, tensors).tolist() == places


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETING, reason="a graph needs a card")
@pytest.mark.parametrize("index", [0, 1, 3])
def test_in_a_cuda_graph(index):
    logits = some_logits(8, 151_936)
    tensors = params([SETTINGS[index]] * 8)
    sampling.sample(logits, tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampling.sample(logits, tensors)
    logits.copy_(some_logits(8, 151_936, seed=9))
    tensors.positions.add_(3)
    graph.replay()
    assert torch.equal(tokens, sampling.sample(logits, tensors))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETING, reason="needs many draws")
@pytest.mark.parametrize("setting", [(1 / 1.4, 0, 1.0, 0.0), (1 / 1.4, 0, 0.8, 0.0),
                                     (1 / 1.4, 30, 0.9, 0.0)])  # fmt: skip
def test_frequencies_are_the_probabilities(setting):
    count = 16_384
    row = some_logits(1, 4097, seed=3)
    tensors = params([setting] * count)
    tokens = sampling.sample(row.expand(count, -1).contiguous(), tensors)
    temperature, top_k, top_p, _ = setting
    mass = (row[0].double() / temperature).softmax(0)
    if top_k:
        mass = torch.where(row[0] >= row[0].topk(top_k).values[-1], mass, 0.0)
    mass = mass / mass.sum()
    above = torch.stack([mass[row[0] > value].sum() for value in row[0]])
    mass = torch.where(above < top_p, mass, 0.0)
    mass = mass / mass.sum()
    top = mass.topk(10).indices
    seen = torch.bincount(tokens, minlength=4097).double()
    assert seen[mass == 0].sum() == 0
    expected = torch.cat([mass[top], 1 - mass[top].sum()[None]]) * count
    counted = torch.cat([seen[top], count - seen[top].sum()[None]])
    degrees = int((expected > 1).sum())
    chi_square = float((((counted - expected) ** 2) / expected)[expected > 1].sum())
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


LOGITS = {"logits": "*bf16", "temperature": "*fp32", "stride": "i32", "V": "i32"}
DRAW = {
    "seeds": "*i64", "positions": "*i64", "group_max": "*fp32", "group_mass": "*fp32",
    "tile_max": "*fp32", "tile_mass": "*fp32", "num_groups": "i32", "num_tiles": "i32",
    "out": "*i64",
}  # fmt: skip
KERNELS = [
    (draw.statistics_kernel, {}, {"TILE": sampling.TILE, "ONCE": True}, 4),
    (draw.pick_kernel, {}, {"GROUPS": 64, "TILE": sampling.TILE}, sampling.PICK_WARPS),
    (filtering.filter_kernel,
     {"top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32", "tile_list": "*i32",
      "kept_mass": "*fp32", "bins": "*i32"},
     {"GROUPS": 64, "TILES": 2048, "TILE": sampling.TILE,
      "BINS": sampling.BINS, "STEP": sampling.STEP,
      "AHEAD": sampling.AHEAD, "SPAN": sampling.SPAN}, sampling.WARPS),
]  # fmt: skip


FORMS = [("*bf16", False), ("*fp32", True), ("*fp32", False), ("*bf16", True)]


def compiled_forms():
    """(index, dtype, is bounded, capability): each form for sm_90, each value for the others."""
    for index in range(len(KERNELS)):
        for capability in (80, 90, 100):
            count = 4 if capability == 90 else 2
            yield from ((index, *form, capability) for form in FORMS[:count])


@outer_only
@pytest.mark.parametrize(("index", "dtype", "bounded", "capability"), [*compiled_forms()])
def test_compiles_ahead_of_time(index, dtype, bounded, capability):
    kernel, more, constants, warps = KERNELS[index]
    known = LOGITS | DRAW | more | {"logits": dtype}
    if bounded:
        known |= {"num_ids": "i32"}
    else:
        constants = constants | {"num_ids": None}
    types = {name: known[name] for name in kernel.arg_names if name in known}
    pointers = [
        name for name, kind in types.items() if kind.startswith("*") or name in {"stride", "V"}
    ]
    constants = constants | {"PDL": capability >= 90}
    compiled = compile_for(
        kernel,
        types,
        constants,
        capability,
        divisible=pointers,
        num_warps=warps,
        maxnreg=sampling.REGISTERS if kernel is filtering.filter_kernel else None,
    )
    assert_fits(compiled, capability)
