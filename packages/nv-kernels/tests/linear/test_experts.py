"""A mixture of experts: the choice of experts and the products, against the definitions."""

import re
from typing import NamedTuple

import nv_kernels as nk
import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels import reference
from nv_kernels.cpp.library import find_compiler
from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.linear.experts import products as products_definitions
from nv_kernels.linear.experts import triton_few as few
from nv_kernels.linear.experts import triton_gate, triton_route, triton_tiles
from nv_kernels.linear.experts import triton_products as products
from nv_kernels.linear.experts import triton_weight as weight
from nv_kernels.linear.experts import weight as weight_definitions
from nv_kernels.linear.experts.gate import SWIGLU, Gate
from nv_kernels.linear.experts.routing import num_tiles
from torch.nn import functional
from torch.overrides import TorchFunctionMode

needs_compiler = pytest.mark.skipif(not find_compiler(), reason="needs a C++ compiler")
DTYPES = (torch.float32, torch.bfloat16)
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def draw(*shape, dtype=torch.float32, seed=0, scale=1.0, device=DEVICE):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)


CLAMPED = Gate(alpha=1.702, limit=0.7, shift=1.0)
"""A gate whose limit about half of the products exceed."""
GATES = pytest.mark.parametrize("gate", [SWIGLU, CLAMPED], ids=["swiglu", "clamped with biases"])


def plain(num_experts, size, width, dtype, device=DEVICE, gate=SWIGLU):
    """Experts in the files' layout; with another gate than SwiGLU also with biases."""

    def made(*shape, seed, scale=1.0):
        return draw(num_experts, *shape, dtype=dtype, seed=seed, scale=scale, device=device)

    gate_up = made(2 * width, size, seed=1, scale=size**-0.5)
    down = made(size, width, seed=2, scale=width**-0.5)
    if gate == SWIGLU:
        return nk.DenseExperts(gate_up, down)
    return nk.DenseExperts(gate_up, down, made(2 * width, seed=11), made(size, seed=12), gate)


def truth(x, by, routing):
    """The layer in fp64, token by token."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for token, (experts, weights) in enumerate(zip(routing.experts, routing.weights, strict=True)):
        for expert, scale in zip(experts.tolist(), weights.double(), strict=True):
            product = by.gate_up[expert].double() @ x[token].double()
            if by.gate == SWIGLU:
                gate, up = product.chunk(2)
                out[token] += scale * (by.down[expert].double() @ (functional.silu(gate) * up))
            else:
                gate, up = (product + by.gate_up_bias[expert].double()).chunk(2)
                gate, up = gate.clamp(max=0.7), up.clamp(-0.7, 0.7)
                gated = gate * torch.sigmoid(1.702 * gate) * (up + 1)
                product = by.down[expert].double() @ gated + by.down_bias[expert].double()
                out[token] += scale * product
    return out


def error(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


class TestRoute:
    @outer_only
    @pytest.mark.parametrize("normalised", [False, True])
    def test_definition_is_transformers(self, normalised):
        logits = draw(9, 16, device="cpu")
        probabilities = functional.softmax(logits, dtype=torch.float32, dim=-1)
        expected, experts = torch.topk(probabilities, 4, dim=-1)
        if normalised:
            expected = expected / expected.sum(-1, keepdim=True)
        found = reference.route(logits, 4, normalised)
        assert torch.equal(found.experts.long(), experts)
        torch.testing.assert_close(found.weights, expected)

    @outer_only
    def test_definition_sorts_entries_into_tiles_of_one_expert(self):
        logits = torch.full((5, 4), -9.0)
        for token, experts in enumerate([(2, 0), (2, 3), (2, 0), (2, 3), (2, 3)]):
            logits[token, experts[0]], logits[token, experts[1]] = 2.0, 1.0
        routing = reference.route(logits, 2, True, 4)
        # Expert 0: entries 1 and 5; expert 2: 0, 2, 4, 6, 8; expert 3: 3, 7, 9.
        expected = [1, 5, -1, -1, 0, 2, 4, 6, 8, -1, -1, -1, 3, 7, 9, -1] + [-1] * 4
        assert routing.places.tolist() == expected
        assert routing.tile_experts.tolist() == [0, 2, 2, 3, -1]

    @outer_only
    def test_definition_gives_the_slots_of_an_expert(self):
        logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 1.0, 2.0]])
        routing = reference.route(logits, 2, True, 16, is_sorted=False)
        assert routing.slots.tolist() == [[-1, 0], [0, -1], [1, 1]]
        assert routing.places is routing.tile_experts is None

    @outer_only
    def test_definition_sums_partials_and_rounds_the_sum(self):
        partials = draw(5, 7, 16, device="cpu")
        logits = partials.sum(0).bfloat16()
        found = reference.route(partials, 4, True, dtype=torch.bfloat16)
        expected = reference.route(logits, 4, True)
        assert torch.equal(found.experts, expected.experts)
        assert torch.equal(found.weights, expected.weights)

    @outer_only
    @pytest.mark.parametrize("entries", [1, 2, 7, 40])
    @pytest.mark.parametrize("experts", [1, 4, 9])
    def test_tiles_are_enough_for_the_worst_case(self, entries, experts):
        worst = 0
        for used in range(1, min(entries, experts) + 1):  # one entry in all experts but one
            worst = max(worst, used - 1 + -(-(entries - used + 1) // 4))
        assert num_tiles(entries, experts, 4) >= worst

    @outer_only
    @needs_compiler
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (5, 5), (128, 8), (33, 1)])
    @pytest.mark.parametrize("normalised", [False, True])
    def test_in_cpp(self, num_experts, top_k, normalised, dtype):
        compare(
            nk.route, draw(7, num_experts, dtype=dtype, device="cpu", scale=3), top_k, normalised
        )

    @outer_only
    @needs_compiler
    def test_ties_in_cpp_go_to_the_lower_id(self):
        check_ties(nk.route, "cpu")

    @on_device
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("tokens", "num_experts", "top_k"),
        [(1, 8, 2), (70, 8, 3), (11, 128, 8), (5, 33, 1), (3, 5, 5)],
    )
    def test_on_a_card(self, tokens, num_experts, top_k, dtype):
        logits = draw(tokens, num_experts, dtype=dtype, scale=3)
        for tile in (0, 16, 64):
            compare(triton_route.route, logits, top_k, True, tile)
        compare(triton_route.route, logits, top_k, True, 16, is_sorted=False)
        compare(triton_route.route, logits, top_k, False, 0)

    @on_device
    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
    @pytest.mark.parametrize("is_sorted", [False, True])
    def test_partials_on_a_card(self, dtype, is_sorted):
        partials = draw(5, 9, 24, scale=2)
        compare(triton_route.route, partials, 3, True, 16, is_sorted=is_sorted, dtype=dtype)

    @on_device
    def test_many_blocks_of_tokens(self, monkeypatch):
        monkeypatch.setattr(triton_route, "ELEMENTS", 64)
        monkeypatch.setattr(triton_route, "COUNTED", 32)
        monkeypatch.setattr(triton_route, "MOST_BLOCKS", 3)  # each takes several steps
        compare(triton_route.route, draw(53, 16), 4, True, 16)

    @on_device
    def test_ties_on_a_card_go_to_the_lower_id(self):
        check_ties(triton_route.route, DEVICE)

    @on_device
    def test_no_token(self):
        routing = triton_route.route(draw(0, 8), 2, True, 16)
        assert routing.experts.shape == (0, 2)
        assert routing.tile_experts.numel() == 0


STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Of the last place."""


def compare(op, logits, top_k, normalised, tile=0, **options):
    found = op(logits, top_k, normalised, tile, **options)
    expected = reference.route(logits, top_k, normalised, tile, **options)
    assert found.tile == tile
    assert torch.equal(found.experts, expected.experts)
    dtype = options.get("dtype", logits.dtype)
    assert found.weights.dtype == expected.weights.dtype == dtype
    torch.testing.assert_close(found.weights, expected.weights, rtol=STEP[dtype], atol=0)
    for name in ("places", "tile_experts", "slots"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        assert ours is None or torch.equal(ours, theirs), name


def check_ties(op, device):
    logits = torch.zeros(4, 8, device=device)
    logits[1, ::2] = 1.0
    logits[2, 1] = -0.0  # equals 0.0
    logits[3] = torch.tensor([0, 5, 5, 0, 5, 0, 5, -float("inf")])
    expected = [[0, 1, 2], [0, 2, 4], [0, 1, 2], [1, 2, 4]]
    assert op(logits, 3, True).experts.tolist() == expected
    assert reference.route(logits, 3, True).experts.tolist() == expected
    logits = logits.to(torch.bfloat16)
    assert op(logits, 3, True).experts.tolist() == expected
    logits[0, 5] = float("nan")  # padding of a captured step may hold anything
    experts = op(logits, 3, True).experts[0].tolist()
    assert len(set(experts)) == 3
    assert all(0 <= expert < 8 for expert in experts)


class TestOnACPU:
    @outer_only
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("tokens", [0, 1, 3, 40])
    @pytest.mark.parametrize("name", ["fast", "batch_invariant"])
    @GATES
    @pytest.mark.parametrize("width", [32, 37])
    def test_layer(self, name, tokens, dtype, gate, width):
        """Of 8 experts, 2 active; 32 divides by all tiles, 37 by no vector."""
        x = draw(tokens, 64, dtype=dtype, device="cpu")
        by = plain(8, 64, width, dtype, "cpu", gate)
        routing = nk.route(draw(tokens, 8, dtype=dtype, seed=3, device="cpu"), 2, True)
        defined = by.mix(x, routing)
        expected = truth(x, by, routing)
        found = nk.arithmetic(name).experts(by).mix(x, routing)
        assert found.dtype == defined.dtype == dtype
        if tokens:
            assert error(defined, expected) < CLOSE[dtype]
            assert error(found, expected) < CLOSE[dtype]

    @outer_only
    @pytest.mark.parametrize("dtype", DTYPES)
    @GATES
    def test_nan_stays_nan(self, dtype, gate):
        by = plain(2, 64, 32, dtype, "cpu", gate)
        x = draw(3, 64, dtype=dtype, device="cpu")
        x[1] = float("nan")
        routing = nk.route(draw(3, 2, dtype=dtype, seed=3, device="cpu"), 2, True)
        for experts in (by, nk.arithmetic("fast").experts(by)):
            is_nan = experts.mix(x, routing).isnan()
            assert is_nan[1].all()
            assert not is_nan[[0, 2]].any()

    @outer_only
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("num_threads", [1, 2])
    def test_bits_do_not_depend_on_the_batch(self, dtype, num_threads):
        tokens = 600  # more than the kernel takes at once
        x = draw(tokens, 64, dtype=dtype, device="cpu")
        logits = draw(tokens, 4, dtype=dtype, seed=3, device="cpu")
        experts = nk.arithmetic("batch_invariant").experts(plain(4, 64, 32, dtype, "cpu"))
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)

        def mixed(some):
            return experts.mix(x[some], experts.route(logits[some], 2, True))

        whole = mixed(slice(None))
        for some in (slice(0, 1), slice(5, 8), slice(130, 261), slice(511, 600)):
            assert torch.equal(mixed(some), whole[some])
        torch.set_num_threads(before)

    @outer_only
    def test_another_dtype_of_tokens(self):
        by = plain(4, 32, 16, torch.float16, "cpu")
        x, logits = draw(3, 32, dtype=torch.float16, device="cpu"), draw(3, 4, device="cpu").half()
        experts = nk.arithmetic("fast").experts(by)
        routing = experts.route(logits, 2, False)
        assert error(experts.mix(x, routing), truth(x, by, routing)) < 4e-3

    @outer_only
    def test_is_added_to_the_stream(self):
        by = plain(4, 32, 16, torch.float32, "cpu")
        x, hidden = draw(3, 32, device="cpu"), draw(3, 32, seed=5, device="cpu")
        experts = nk.arithmetic("fast").experts(by)
        routing = experts.route(draw(3, 4, seed=3, device="cpu"), 2, True)
        expected = truth(x, by, routing)
        stream = experts.linear_add(x, routing, nk.Stream(hidden))
        assert torch.equal(stream.hidden, hidden)
        assert error(stream.pending, expected) < 1e-6
        doubled = nk.RankSum(lambda partial: partial * 2)  # two ranks with the same part
        stream = experts.linear_add(x, routing, nk.Stream(hidden), doubled)
        assert error(stream.pending, 2 * expected) < 1e-6


NO_LAUNCH = {"__get__", "contiguous", "data_ptr", "dim", "element_size", "empty", "empty_like",
             "numel"}  # fmt: skip
"""Functions that allocate, read a shape, or return a tensor that is contiguous already."""


class Watched(TorchFunctionMode):
    """Names torch's own functions: on a card most would be a launch."""

    def __init__(self):
        super().__init__()
        self.seen = set()
        self.is_paused = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not self.is_paused:
            self.seen.add(func.__name__)
        return func(*args, **(kwargs or {}))


class Scores(NamedTuple):
    """A router."""

    weight: nk.Weight
    bias: torch.Tensor | None
    top_k: int = 2
    is_normalised: bool = True


class RMS(NamedTuple):
    """A norm of the stream."""

    weight: torch.Tensor
    eps: float = 1e-6


def on_triton(monkeypatch):
    """Let the layer use the kernels, also in the interpreter, whose tensors are on a CPU."""
    monkeypatch.setattr(weight, "route", triton_route.route)
    for module in (weight_definitions, products_definitions):
        monkeypatch.setattr(module, "expert_gated_linear", products.expert_gated_linear)
        monkeypatch.setattr(module, "expert_linear", products.expert_linear)


class TestOnACard:
    @on_device
    @pytest.mark.parametrize(
        ("tile", "dtype"),
        [(0, torch.float32), (0, torch.bfloat16), (16, torch.float32), (16, torch.bfloat16),
         (32, torch.float16), (64, torch.bfloat16), (128, torch.bfloat16)],
    )  # fmt: skip
    @GATES
    @pytest.mark.parametrize("is_sorted", [True, False])
    def test_products(self, tile, dtype, gate, is_sorted):
        """With outputs and columns that no tile divides."""
        tokens, size, width = (19, 144, 80) if tile else (2, 72, 40)
        x = draw(tokens, size, dtype=dtype)
        by = plain(4, size, width, dtype, gate=gate)
        logits = draw(tokens, 4, dtype=dtype, seed=3)
        routing = triton_route.route(logits, 2, True, tile, is_sorted=is_sorted)
        first, last = (by.gate_up, routing, by.gate_up_bias, gate), (by.down, routing, by.down_bias)
        gated = products.expert_gated_linear(x, *first)
        assert error(gated, reference.expert_gated_linear(x, *first)) < CLOSE[dtype]
        partials = products.expert_linear(gated, *last)
        assert partials.shape == (2, tokens, size)
        assert error(partials, reference.expert_linear(gated, *last)) < CLOSE[dtype]
        whole = products.sum_partials(partials)
        assert torch.equal(whole, reference.sum_partials(partials))
        assert error(whole, truth(x, by, routing)) < CLOSE[dtype]

    @on_device
    @pytest.mark.parametrize("tile", [16, 32, 64, 128])
    @pytest.mark.parametrize("is_sorted", [True, False])
    def test_bulk_copies(self, tile, is_sorted, monkeypatch):
        """The same bits as without them; the last box of rows and of columns is not full."""
        x, by = draw(19, 144, dtype=torch.bfloat16), plain(4, 144, 80, torch.bfloat16)
        logits = draw(19, 4, dtype=torch.bfloat16, seed=3)
        routing = triton_route.route(logits, 2, True, tile, is_sorted=is_sorted)
        results = []
        for has_bulk_copies in (False, triton_tiles.has_bulk_copies(x) or INTERPRETING):
            monkeypatch.setattr(triton_tiles, "has_bulk_copies", lambda _, has=has_bulk_copies: has)
            gated = triton_tiles.tiles(x, by.gate_up, None, routing, SWIGLU)
            results.append((gated, triton_tiles.tiles(gated, by.down, None, routing, None)))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)

    @on_device
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("tokens", [1, 2, 3, 40, 150])
    @pytest.mark.parametrize("top_k", [2, 3])
    @GATES
    def test_layer(self, tokens, dtype, top_k, gate, monkeypatch):
        """From the stream to the stream, also where an expert has more entries than a tile."""
        on_triton(monkeypatch)
        size, width = 296, 40  # more columns than a warp loads at once
        by = plain(4, size, width, dtype, gate=gate)
        router = nk.arithmetic("fast").weight(draw(4, size, dtype=dtype, seed=4))
        bias = draw(4, dtype=dtype, seed=7)
        scores = Scores(router, bias if gate == CLAMPED else None, top_k)
        norm = RMS(draw(size, dtype=torch.float32, seed=5))
        stream = nk.Stream(draw(tokens, size, dtype=dtype), draw(tokens, size, dtype=dtype, seed=6))
        normed, plainly = nk.normalise(stream, norm)
        routing = reference.route(router.linear(normed, scores.bias), top_k, True)
        expected = plainly.hidden + truth(normed, by, routing)
        for pending in (stream, plainly):
            found = weight.dense_experts(by).norm_add(pending, norm, scores)
            whole = nk.add_pending(found).hidden if found.pending is None else None
            if whole is None:
                whole = nk.normalise(found, norm)[1].hidden
            assert whole.dtype == dtype
            assert error(whole, expected) < CLOSE[dtype]

    @on_device
    @pytest.mark.parametrize("tokens", [1, 40])
    def test_sum_over_ranks(self, tokens, monkeypatch):
        on_triton(monkeypatch)
        by = plain(4, 64, 32, torch.float32)
        scores = Scores(nk.arithmetic("fast").weight(draw(4, 64, seed=4)), None)
        stream, norm = nk.Stream(draw(tokens, 64)), RMS(torch.ones(64, device=DEVICE))
        alone = weight.dense_experts(by).norm_add(stream, norm, scores)
        alone = nk.normalise(alone, norm)[1].hidden
        doubled = nk.RankSum(lambda partial: partial * 2)  # two ranks with the same part
        found = weight.dense_experts(by).norm_add(stream, norm, scores, doubled)
        assert torch.equal(found.hidden, stream.hidden)
        assert error(found.pending, 2 * (alone - stream.hidden)) < 1e-5

    @on_device
    @pytest.mark.parametrize("tile", [0, 16])
    @pytest.mark.parametrize("is_sorted", [True, False])
    def test_nan_stays_nan(self, tile, is_sorted):
        by = plain(2, 32, 16, torch.float32, gate=CLAMPED)
        x = draw(3, 32)
        x[1] = float("nan")
        routing = triton_route.route(draw(3, 2, seed=3), 2, True, tile, is_sorted=is_sorted)
        first = (by.gate_up, routing, by.gate_up_bias, CLAMPED)
        is_nan = products.expert_gated_linear(x, *first).isnan()
        assert is_nan[1].all()
        assert not is_nan[[0, 2]].any()

    @on_device
    @pytest.mark.parametrize("tokens", [1, 40])
    @pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter
    def test_nan_of_a_router_chooses_experts_that_exist(self, tokens, monkeypatch):
        """Padding of a captured step may hold anything."""
        on_triton(monkeypatch)
        by = plain(4, 64, 32, torch.float32)
        scores = Scores(nk.arithmetic("fast").weight(draw(4, 64, seed=4)), None)
        hidden, norm = draw(tokens, 64), RMS(torch.ones(64, device=DEVICE))
        hidden[0] = float("nan")
        found = weight.dense_experts(by).norm_add(nk.Stream(hidden), norm, scores)
        is_nan = nk.normalise(found, norm)[1].hidden.isnan()
        assert is_nan[0].all()
        assert not is_nan[1:].any()

    @on_device
    def test_no_token(self, monkeypatch):
        on_triton(monkeypatch)
        experts = weight.dense_experts(plain(4, 32, 16, torch.float32))
        for tile in (0, 16):
            routing = triton_route.route(draw(0, 4), 2, True, tile)
            partials = experts.partials(draw(0, 32), routing)
            assert partials.shape == ((2, 0, 32) if tile else (0, 32))

    @on_device
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_bits_do_not_depend_on_the_batch(self, dtype, monkeypatch):
        on_triton(monkeypatch)
        x, logits = draw(90, 64, dtype=dtype), draw(90, 4, dtype=dtype, seed=3)
        experts = weight.batch_invariant_experts(plain(4, 64, 32, dtype))

        def partials(some):
            return experts.partials(x[some], experts.route(logits[some], 2, True))

        whole = partials(slice(None))
        for some in (slice(0, 1), slice(3, 8), slice(50, 90)):
            assert torch.equal(partials(some), whole[:, some])

    @on_device
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_bits_of_a_layer_do_not_depend_on_the_batch(self, dtype, monkeypatch):
        """From the stream on: the router's product may come as partials, or whole."""
        on_triton(monkeypatch)
        size = 1024  # several parts
        experts = weight.batch_invariant_experts(plain(4, size, 32, dtype))
        kind = nk.arithmetic("batch_invariant")
        scores = Scores(kind.weight(draw(4, size, dtype=dtype, seed=4)), None)
        norm = RMS(torch.ones(size, dtype=dtype, device=DEVICE))
        tokens = 20 if INTERPRETING else 300
        hidden = draw(tokens, size, dtype=dtype)

        def pending(some):
            return experts.norm_add(nk.Stream(hidden[some]), norm, scores).pending

        whole = pending(slice(None))
        for some in (slice(0, 1), slice(3, 8), slice(11, tokens)):
            assert torch.equal(pending(some), whole[:, some])

    @outer_only
    def test_height_of_tiles(self):
        heights = {tokens: weight.tile_height(tokens * 8, 128) for tokens in (1, 256, 257, 512)}
        assert heights == {1: 16, 256: 16, 257: 32, 512: 32}
        assert weight.tile_height(16384 * 8, 128) == 128
        assert set(triton_tiles.GATED) == set(triton_tiles.DOWN) == {16, 32, 64, 128}

    @on_device
    @pytest.mark.parametrize(("tokens", "most"), [(1, 3), (2, 3), (40, 3), (130, 4)])
    @pytest.mark.parametrize("name", ["dense_experts", "batch_invariant_experts"])
    def test_launches(self, name, tokens, most, monkeypatch):
        """With the router's product at most 5; the sum over k is in the last, or the next norm."""
        if not INTERPRETING:
            pytest.skip("counts what the interpreter launches")
        from triton.runtime import interpreter  # noqa: PLC0415

        on_triton(monkeypatch)
        experts = getattr(weight, name)(plain(4, 32, 16, torch.float32))
        hidden, logits = draw(tokens, 32), draw(tokens, 4, seed=3)
        scores, norm = Scores(Given(logits, hidden), None), RMS(torch.ones(32))
        launches = []
        run = interpreter.GridExecutor.__call__

        def counted(self, *args, **options):
            launches.append(self.fn.__name__)
            ops.is_paused = True  # the interpreter itself calls torch
            run(self, *args, **options)
            ops.is_paused = False

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
        monkeypatch.setattr(weight_definitions, "normalise", lambda stream, _: (hidden, stream))
        with Watched() as ops:
            stream = experts.norm_add(nk.Stream(hidden), norm, scores)
        assert len(launches) <= (most if name == "dense_experts" else 4), launches
        assert ops.seen <= NO_LAUNCH, ops.seen
        if name == "dense_experts" and tokens <= weight.FEW_TOKENS:
            assert stream.pending is None
        else:
            assert stream.pending.shape == (2, tokens, 32)


class Given(NamedTuple):
    """A router's weight whose product is known: it launches nothing."""

    logits: torch.Tensor
    hidden: torch.Tensor

    def partials(self, _x, _bias):
        return self.logits

    def norm_linear(self, stream, _norm, _bias):
        return self.logits, stream


STREAMED = re.compile(r"ld\.global\.L1::evict_first\S*\.v4\.b32")
"""A load of 16 bytes that leaves L2 first."""


@outer_only
@pytest.mark.parametrize("capability", [80, 90, 100])
class TestCompilesAheadOfTime:
    @pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (8, 2)])
    @pytest.mark.parametrize(
        ("result", "partials"), [(None, 1), ("slots", 1), ("slots", 16), ("counts", 1)]
    )
    def test_route(self, num_experts, top_k, result, partials, capability):
        block_e = next_power_of_2(num_experts)
        tokens = min(triton_route.MOST_TOKENS, triton_route.ELEMENTS // block_e)
        pointers = {"logits": "*bf16" if partials == 1 else "*fp32", "experts": "*i32",
                    "weights": "*bf16"}  # fmt: skip
        kinds = {"counts": "*i32", "slots": "*i16"}
        pointers |= {name: kind for name, kind in kinds.items() if name == result}
        absent = {name: None for name in kinds if name != result}
        compiled = compile_for(
            triton_route.route_kernel,
            pointers | {"num_tokens": "i32", "steps": "i32"},
            {"E": num_experts, "TOP_K": top_k, "NORMALISED": True, "PARTIALS": partials,
             "TOKENS": tokens if result == "counts" else 1, "BLOCK_E": block_e,
             "PDL": capability >= 90} | absent,
            capability,
            divisible=tuple(pointers),
            num_warps=4 if result == "counts" else 1,
        )  # fmt: skip
        assert_fits(compiled, capability)
        if result is None:
            assert "bar.sync" not in compiled.ptx  # one warp

    def test_places(self, capability):
        sort = dict.fromkeys(("experts", "counts", "places", "tile_experts"), "*i32")
        compiled = compile_for(
            triton_route.places_kernel,
            sort | {"num_tokens": "i32", "steps": "i32", "tiles": "i32"},
            {"E": 128, "TOP_K": 8, "TILE": 128, "TOKENS": triton_route.ELEMENTS // 128,
             "BLOCKS": triton_route.COUNTED // 128, "BLOCK_E": 128, "PDL": capability >= 90},
            capability,
            divisible=tuple(sort),
            num_warps=4,
        )  # fmt: skip
        assert_fits(compiled, capability)
        assert "atom" not in compiled.ptx
        assert ("griddepcontrol.wait" in compiled.ptx) == (capability >= 90)

    # Qwen3-30B-A3B: gate and up of 768 from 2048, and back. GPT-OSS: 2880, and back.
    @pytest.mark.parametrize(("outputs", "columns", "top_k"), [(768, 2048, 8), (2880, 2880, 4)])
    @pytest.mark.parametrize("has_norm", [True, False])
    @GATES
    def test_few_gated(self, outputs, columns, top_k, has_norm, gate, capability):
        pointers = {"x": "*bf16", "weight": "*bf16", "experts": "*i32", "out": "*bf16"}
        pointers |= biased("*bf16", gate) | ({"norm_weight": "*bf16"} if has_norm else {})
        compiled = compile_for(
            few.few_gated_kernel,
            pointers | {"eps": "fp32"},
            {"N": outputs, "K": columns, "TOP_K": top_k, "ROWS": few.GATED_ROWS,
             "SLOTS": top_k, "COLUMNS": few.COLUMNS, "EARLY": True, "PDL": capability >= 90}
            | constants(True, gate) | ({} if has_norm else {"norm_weight": None}),
            capability,
            divisible=tuple(pointers),
            num_warps=min(few.GATED_WARPS, top_k),
        )  # fmt: skip
        assert_fits(compiled, capability)
        assert STREAMED.search(compiled.ptx)

    @pytest.mark.parametrize(("outputs", "columns", "top_k"), [(2048, 768, 8), (2880, 2880, 4)])
    @GATES
    def test_few_down(self, outputs, columns, top_k, gate, capability):
        pointers = {"x": "*bf16", "weight": "*bf16", "experts": "*i32", "scales": "*bf16",
                    "residual": "*bf16", "out": "*bf16"} | biased("*bf16", gate)  # fmt: skip
        compiled = compile_for(
            few.few_down_kernel,
            pointers | {"num_tokens": "i32"},
            {"N": outputs, "K": columns, "TOP_K": top_k, "SUM": True, "ROWS": few.DOWN_ROWS,
             "SLOTS": top_k, "COLUMNS": few.COLUMNS,
             "HELD": min(few.EARLY_CHUNKS, cdiv(columns, few.COLUMNS)), "EARLY": True,
             "PDL": capability >= 90} | ({"bias": None} if gate == SWIGLU else {}),
            capability,
            divisible=tuple(pointers),
            num_warps=min(few.DOWN_WARPS, top_k),
        )  # fmt: skip
        assert_fits(compiled, capability)
        first_load = STREAMED.search(compiled.ptx)
        assert first_load
        if capability >= 90:  # the weights are on their way before the wait
            assert first_load.start() < compiled.ptx.index("griddepcontrol.wait")

    @pytest.mark.parametrize("tile", [16, 32, 64, 128])
    @pytest.mark.parametrize(
        ("gated", "outputs", "columns"), [(True, 768, 2048), (False, 2048, 768)]
    )
    @pytest.mark.parametrize("is_sorted", [True, False])
    def test_tiles(self, gated, outputs, columns, tile, is_sorted, capability):
        if tile > weight.MOST_SLOTS_TILE and not is_sorted:
            pytest.skip("is never launched")
        shape = (triton_tiles.GATED if gated else triton_tiles.DOWN)[tile]
        sizes = outputs, columns
        check_tiles("*bf16", shape, tile, gated, SWIGLU, sizes, capability, is_sorted=is_sorted)

    # GPT-OSS: gate and up of 2880 from 2880, and back.
    @pytest.mark.parametrize("gated", [True, False])
    @pytest.mark.parametrize("tile", [16, 128])
    def test_tiles_with_biases(self, gated, tile, capability):
        shape = (triton_tiles.GATED if gated else triton_tiles.DOWN)[tile]
        check_tiles("*bf16", shape, tile, gated, CLAMPED, (2880, 2880), capability)

    def test_tiles_of_fp32(self, capability):
        check_tiles("*fp32", triton_tiles.SINGLE, 64, True, SWIGLU, (768, 2048), capability)


def biased(dtype, gate):
    """The type of a kernel's bias, where its experts have one."""
    return {} if gate == SWIGLU else {"bias": dtype}


def constants(gated, gate):
    """The constants of a kernel's gate and of a bias that its experts lack."""
    names = ("GATED", "ALPHA", "LIMIT", "SHIFT")
    values = dict(zip(names, triton_gate.constants(gate if gated else None), strict=True))
    return values | ({"bias": None} if gate == SWIGLU else {})


def check_tiles(dtype, shape, tile, gated, gate, sizes, capability, *, is_sorted=True):
    is_bulk = capability >= 90
    order = {"places": "*i32", "tile_experts": "*i32"} if is_sorted else {"slots": "*i16"}
    pointers = {"x": dtype, "scales": dtype, "out": dtype, **order, **biased(dtype, gate)}
    types = pointers | {"weight": dtype, "num_tokens": "i32"}
    finds = {"TOKENS": 128, "EARLY": not gated}
    if is_bulk:
        sides = 2 if gated and tile >= triton_tiles.JOINED_FROM.value else 1
        types["weight"] = f"tensordesc<{dtype[1:]}[{sides}, {shape.block_n}, {shape.block_k}]>"
    else:
        pointers["weight"] = dtype
    compiled = compile_for(
        triton_tiles.sorted_kernel if is_sorted else triton_tiles.slots_kernel,
        types,
        {"N": sizes[0], "K": sizes[1], "TOP_K": 8, "BLOCK_M": tile, "BLOCK_N": shape.block_n,
         "BLOCK_K": shape.block_k, "STAGES": shape.stages, "BULK": is_bulk,
         "PDL": capability >= 90}
        | constants(gated, gate) | ({} if is_sorted else finds),
        capability,
        divisible=tuple(pointers),
        num_warps=shape.warps,
    )  # fmt: skip
    assert_fits(compiled, capability)
    assert "atom" not in compiled.ptx
    assert ("griddepcontrol.wait" in compiled.ptx) == (capability >= 90)
    if capability == 90 and dtype != "*fp32":
        assert "cp.async.bulk.tensor" in compiled.ptx
        assert "wgmma.mma_async" in compiled.ptx
