"""Adapters of low rank: the sort of tokens, the products and the sum, against the definitions."""

import nv_kernels as nk
import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from interpreter import DEVICE, on_device, outer_only, run_interpreted
from nv_kernels import reference
from nv_kernels.linear.lora import triton_expand, triton_plan, triton_shrink
from nv_kernels.linear.lora import weight as lora_weight
from nv_kernels.linear.lora.weight import Adapted
from nv_kernels.linear.triton import product as choice
from nv_kernels.linear.triton.dot import dot, dot_kernel
from nv_kernels.linear.triton.gemv import GemvAdapters, gemv, gemv_kernel
from nv_kernels.linear.triton.weight import TritonDense
from nv_kernels.linear.tuned import Dot, Gemv, choose_adapted
from nv_kernels.linear.weight import BatchInvariantDense, Dense
from torch.nn import functional

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = tuple(CLOSE)
PARTS = ((80,), (48, 48), (64, 16, 24))
NUM_ADAPTERS, RANK = 5, 16


def draw(*shape, dtype=torch.float32, seed=0, scale=1.0, device=DEVICE):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)


def adapters_of(num_tokens, device=DEVICE, seed=3):
    """A random adapter, or none, for each token; adapter 2 has no token."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(-1, NUM_ADAPTERS, (num_tokens,), generator=generator)
    return torch.where(found == 2, -1, found).int().to(device)


def matrices(parts, columns, dtype, device=DEVICE, rank=RANK):
    """Adapters of unequal ranks in one pool, whose slots lie apart in memory."""
    rows, total = len(parts) * rank, sum(parts)
    pool = draw(NUM_ADAPTERS, rows * columns + total * rank + 32, dtype=dtype, device=device)
    pool = pool * columns**-0.5
    a = pool[:, : rows * columns].view(NUM_ADAPTERS, rows, columns)
    b = pool[:, rows * columns : rows * columns + total * rank].view(NUM_ADAPTERS, total, rank)
    b.mul_(4)
    for adapter in range(NUM_ADAPTERS):  # zeros above an adapter's own rank
        a[adapter].view(len(parts), rank, columns)[:, adapter + 1 :] = 0
        b[adapter, :, adapter + 1 :] = 0
    return nk.LoraWeights(a, b, parts)


def truth(x, adapters, lora):
    """The adapters' products in fp64, token by token."""
    out = torch.zeros(len(x), sum(lora.part_rows), dtype=torch.float64, device=x.device)
    rank = lora.b.shape[2]
    for token, adapter in enumerate(adapters.tolist()):
        if adapter < 0:
            continue
        hidden = lora.a[adapter].double() @ x[token].double()
        start = 0
        for part, rows in enumerate(lora.part_rows):
            b = lora.b[adapter, start : start + rows].double()
            out[token, start : start + rows] = b @ hidden[part * rank : (part + 1) * rank]
            start += rows
    return out


def error(actual, expected):
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


class TestPlan:
    @outer_only
    def test_definition_sorts_tokens_into_tiles_of_one_adapter(self):
        adapters = torch.tensor([1, -1, 0, 1, 1, -1, 1], dtype=torch.int32)
        plan = nk.lora_plan(adapters, 3, 2)
        assert plan.tile_adapters.tolist() == [0, 1, 1, -1, -1]
        assert plan.present[:3].tolist() == [2, 0, 1]
        assert plan.places.tolist() == [2, -1, 0, 3, 4, 6, 1, 5, -1, -1]
        groups = [(adapter, tokens.tolist()) for adapter, tokens in plan.groups()]
        assert groups == [(0, [2]), (1, [0, 3]), (1, [4, 6])]
        assert plan.of_rows(torch.tensor([3, 1, 2])).adapters.tolist() == [1, -1, 0]

    @outer_only
    def test_tiles_by_tokens(self):
        assert [nk.lora_tile(n, "cuda") for n in (1, 256, 257)] == [16, 16, 64]
        assert nk.lora_tile(4000, "cuda", is_batch_invariant=True) == 16
        assert [nk.lora_tile(n, "cpu") for n in (0, 1, 70)] == [1, 1, 70]

    @on_device
    @pytest.mark.parametrize(("num_tokens", "tile"), [(0, 16), (1, 16), (33, 16), (100, 64)])
    def test_on_a_card(self, num_tokens, tile, monkeypatch):
        monkeypatch.setattr(triton_plan, "ELEMENTS", 8 * 16)  # several blocks of tokens
        adapters = adapters_of(num_tokens)
        found = triton_plan.lora_plan(adapters, NUM_ADAPTERS, tile, True)
        expected = reference.lora_plan(adapters, NUM_ADAPTERS, tile, True)
        assert torch.equal(found.tile_adapters, expected.tile_adapters)
        assert torch.equal(found.places, expected.places)
        assert found[5:8] == expected[5:8] == (tile, NUM_ADAPTERS, True)
        count = int(expected.present[0])
        assert count == len(adapters[adapters >= 0].unique())
        assert torch.equal(found.present[: count + 1], expected.present[: count + 1])

    @on_device
    def test_every_token_has_one_adapter(self):
        for adapter in (-1, 4):
            adapters = torch.full((20,), adapter, dtype=torch.int32, device=DEVICE)
            found = triton_plan.lora_plan(adapters, NUM_ADAPTERS, 16)
            expected = reference.lora_plan(adapters, NUM_ADAPTERS, 16)
            assert torch.equal(found.places, expected.places)
            assert torch.equal(found.tile_adapters, expected.tile_adapters)


class TestDefinitions:
    @outer_only
    @pytest.mark.parametrize("ops", [nk, reference], ids=["cpp", "definition"])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("parts", PARTS)
    def test_the_sum_is_the_truth(self, parts, dtype, ops):
        x = draw(23, 96, dtype=dtype, device="cpu")
        lora = matrices(parts, 96, dtype, "cpu")
        plan = nk.lora_plan(adapters_of(23, "cpu"), NUM_ADAPTERS, 23)
        product = draw(23, sum(parts), dtype=dtype, seed=5, device="cpu")
        expected = product.double() + truth(x, plan.adapters, lora)
        before = product.clone()
        hidden = ops.lora_shrink(x, lora.a, plan)
        found = ops.lora_expand(product, hidden, lora.b, parts, plan)
        assert found is product
        assert error(found, expected) < CLOSE[dtype]
        without = plan.adapters < 0
        assert torch.equal(found[without], before[without])

    @outer_only
    @pytest.mark.parametrize("ops", [nk, reference], ids=["cpp", "definition"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_token_s_bits_do_not_depend_on_the_others(self, dtype, ops):
        x, lora = draw(23, 96, dtype=dtype, device="cpu"), matrices((64, 16, 24), 96, dtype, "cpu")
        adapters, base = adapters_of(23, "cpu"), draw(23, 104, dtype=dtype, seed=5, device="cpu")

        def run(rows):
            plan = nk.lora_plan(adapters[rows], NUM_ADAPTERS, max(len(rows), 1))
            hidden = ops.lora_shrink(x[rows], lora.a, plan)
            return ops.lora_expand(base[rows], hidden, lora.b, lora.part_rows, plan)

        together = run(list(range(23)))
        for rows in ([0], [3, 7], list(range(11, 23))):
            assert torch.equal(run(rows), together[rows])

    @outer_only
    def test_partials_gain_it_in_the_first(self):
        x, lora = draw(9, 96, device="cpu"), matrices((80,), 96, torch.float32, "cpu")
        plan = nk.lora_plan(adapters_of(9, "cpu"), NUM_ADAPTERS, 9)
        partials = draw(3, 9, 80, seed=5, device="cpu")
        expected = partials.double().sum(0) + truth(x, plan.adapters, lora)
        rest = partials[1:].clone()
        nk.lora_expand(partials, nk.lora_shrink(x, lora.a, plan), lora.b, (80,), plan)
        assert error(partials.sum(0), expected) < 1e-5
        assert torch.equal(partials[1:], rest)


def layer_error(weight, x, values, lora, plan, *, norm=None, gated=False):
    """How far a weight with adapters is from the truth, in one of its methods."""
    stream = nk.Stream(x)
    if norm is None:
        product = weight.gated_linear(x) if gated else weight.partials(x)
        seen = x.double()
    else:
        method = weight.norm_gated_linear if gated else weight.norm_linear
        product, _ = method(stream, norm)
        seen = x.double() * torch.rsqrt(x.double().pow(2).mean(1, keepdim=True) + norm.eps)
        seen = seen * norm.weight.double()
    if product.dim() == 3:
        product = product.float().sum(0)
    expected = seen @ values.double().T + truth(seen, plan.adapters, lora)
    if gated:
        gate, up = expected.chunk(2, 1)
        expected = functional.silu(gate) * up
    return error(product, expected)


class Norm:
    eps = 1e-6

    def __init__(self, size, dtype, device=DEVICE):
        self.weight = 1 + draw(size, dtype=dtype, seed=8, scale=0.1, device=device)


@outer_only
@pytest.mark.parametrize("kind", [Dense, BatchInvariantDense])
@pytest.mark.parametrize("gated", [False, True])
def test_a_weight_with_adapters(kind, gated):
    parts = (48, 48) if gated else (64, 16, 24)
    x, lora = draw(23, 96, device="cpu"), matrices(parts, 96, torch.float32, "cpu")
    plan = nk.lora_plan(adapters_of(23, "cpu"), NUM_ADAPTERS, 23)
    values = draw(sum(parts), 96, seed=6, scale=0.1, device="cpu")
    weight = kind(values).adapted(lora, plan)
    assert isinstance(weight, Adapted)
    for given in (None, Norm(96, torch.float32, "cpu")):
        assert layer_error(weight, x, values, lora, plan, norm=given, gated=gated) < 1e-5
    if not gated:
        stream = nk.Stream(draw(23, 104, seed=9, device="cpu"))
        total = weight.linear_add(x, stream)
        expected = x.double() @ values.double().T + truth(x, plan.adapters, lora)
        assert error(total.pending, expected) < 1e-5
        assert error(weight.logits(x), expected) < 1e-5


class TestProducts:
    @on_device
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("num_tokens", "tile"), [(20, 16), (40, 64)])
    @pytest.mark.parametrize("parts", PARTS)
    def test_on_a_card(self, parts, num_tokens, tile, dtype):
        x, lora = draw(num_tokens, 300, dtype=dtype), matrices(parts, 300, dtype)
        plan = reference.lora_plan(adapters_of(num_tokens), NUM_ADAPTERS, tile)
        product = draw(num_tokens, sum(parts), dtype=dtype, seed=5)
        hidden = triton_shrink.lora_shrink(x, lora.a, plan)
        expected = reference.lora_shrink(x, lora.a, plan)
        chosen = plan.adapters >= 0
        assert error(hidden.sum(0)[chosen], expected[0][chosen]) < 1e-5
        expected = reference.lora_expand(product.clone(), expected, lora.b, parts, plan)
        if len(parts) == 2:
            gated = triton_expand.lora_expand_gated(product.clone(), hidden, lora.b, parts, plan)
            gate, up = expected.chunk(2, 1)
            assert error(gated, functional.silu(gate.double()) * up.double()) < 2 * CLOSE[dtype]
        found = triton_expand.lora_expand(product.clone(), hidden, lora.b, parts, plan)
        assert error(found, expected) < CLOSE[dtype]
        assert torch.equal(found[~chosen], product[~chosen])

    @on_device
    def test_a_large_rank_and_partials(self):
        x, lora = draw(20, 128), matrices((80,), 128, torch.float32, rank=128)
        plan = reference.lora_plan(adapters_of(20), NUM_ADAPTERS, 16)
        partials = draw(2, 20, 80, seed=5)
        expected = partials.double().sum(0) + truth(x, plan.adapters, lora)
        hidden = triton_shrink.lora_shrink(x, lora.a, plan)
        triton_expand.lora_expand(partials, hidden, lora.b, (80,), plan)
        assert error(partials.sum(0), expected) < 1e-5

    @on_device
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_batch_invariant(self, dtype):
        """Each token alone gives the bits that it gives among 40."""
        x, lora = draw(40, 600, dtype=dtype), matrices((64, 16, 24), 600, dtype)
        adapters, base = adapters_of(40), draw(40, 104, dtype=dtype, seed=5)

        def run(rows):
            plan = triton_plan.lora_plan(adapters[rows].contiguous(), NUM_ADAPTERS, 16, True)
            hidden = triton_shrink.lora_shrink(x[rows], lora.a, plan)
            product = base[rows].clone()
            return triton_expand.lora_expand(product, hidden, lora.b, lora.part_rows, plan)

        together = run(list(range(40)))
        for token in (0, 7, 39):
            assert torch.equal(run([token]), together[token][None])

    @on_device
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("num_tokens", [1, 2])
    def test_few_tokens(self, num_tokens, dtype, monkeypatch):
        monkeypatch.setattr(triton_shrink, "FEW_SPAN", 128)
        x, lora = draw(num_tokens, 300, dtype=dtype), matrices((64, 16, 24), 300, dtype)
        adapters = torch.tensor([3, -1][:num_tokens], dtype=torch.int32, device=DEVICE)
        hidden = triton_shrink.shrink_few(x, lora.a, adapters)
        assert len(hidden) == 3
        expected = x[:1].double() @ lora.a[3].double().T
        assert error(hidden.sum(0)[:1], expected) < 1e-5
        assert not hidden[:, 1:].any()
        scale = Norm(300, dtype).weight
        hidden = triton_shrink.shrink_few(x, lora.a, adapters, scale)
        expected = (x[:1].double() * scale.double()) @ lora.a[3].double().T
        assert error(hidden.sum(0)[:1], expected) < 1e-5

    @on_device
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("num_tokens", [1, 2])
    @pytest.mark.parametrize("gated", [False, True])
    def test_in_a_vector_product(self, num_tokens, gated, dtype, monkeypatch):
        monkeypatch.setattr(triton_shrink, "FEW_SPAN", 128)
        parts = (44, 44) if gated else (64, 16, 24)
        x, lora = draw(num_tokens, 300, dtype=dtype), matrices(parts, 300, dtype)
        adapters = torch.tensor([3, -1][:num_tokens], dtype=torch.int32, device=DEVICE)
        values = draw(sum(parts), 300, dtype=dtype, seed=6, scale=0.1)
        hidden = triton_shrink.shrink_few(x, lora.a, adapters)
        given = GemvAdapters(hidden, lora.b, adapters, parts)
        found = gemv(Gemv(8, 256, 4), x, values, gated=gated, adapters=given)
        expected = x.double() @ values.double().T + truth(x, adapters, lora)
        if gated:
            gate, up = expected.chunk(2, 1)
            expected = functional.silu(gate) * up
        assert error(found, expected) < CLOSE[dtype]
        without = gemv(Gemv(8, 256, 4), x, values, gated=gated)
        assert torch.equal(found[1:], without[1:])

    @on_device
    @pytest.mark.parametrize("swap", [False, True])
    @pytest.mark.parametrize(
        ("gated", "rank", "split_k"),
        [(False, 16, 1), (False, 16, 2), (False, 128, 1), (False, 128, 2), (True, 16, 1),
         (True, 64, 1)],
    )  # fmt: skip
    def test_in_a_product_on_the_tensor_cores(self, gated, rank, split_k, swap):
        """Adapters of several iterations, in one and in two programs along K."""
        dtype, parts = torch.bfloat16, (96, 96) if gated else (128, 64)
        x, lora = draw(20, 256, dtype=dtype), matrices(parts, 256, dtype, rank=rank)
        plan = reference.lora_plan(adapters_of(20), NUM_ADAPTERS, 16)
        values = draw(192, 256, dtype=dtype, seed=6, scale=0.1)
        form = Dot(32, 64, 64, split_k, 2, swap, 4)
        found = dot(form, x, values, gated=gated, adapters=(lora, plan))
        assert not plan.ready.any()
        without = dot(form, x, values, gated=gated)
        expected = x.double() @ values.double().T + truth(x, plan.adapters, lora)
        if gated:
            gate, up = expected.chunk(2, 1)
            expected = functional.silu(gate) * up
        chosen = (plan.adapters >= 0).nonzero()[:, 0]
        others = (plan.adapters < 0).nonzero()[:, 0]
        if split_k > 1:
            found, without = found.sum(0), without.sum(0)
        assert error(found[chosen], expected[chosen]) < CLOSE[dtype]
        assert torch.equal(found[others], without[others])


@on_device
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 20])
@pytest.mark.parametrize("gated", [False, True])
def test_a_weight_on_a_card(num_tokens, gated, monkeypatch):
    """Every method of a weight of bf16, from one token to many."""
    for name in ("lora_shrink", "lora_expand", "lora_expand_gated"):
        module = triton_shrink if name == "lora_shrink" else triton_expand
        monkeypatch.setattr(lora_weight, name, vars(module)[name])
    dtype, parts = torch.bfloat16, (64, 64) if gated or num_tokens == 20 else (64, 32, 32)
    x, lora = draw(num_tokens, 128, dtype=dtype), matrices(parts, 128, dtype)
    plan = reference.lora_plan(adapters_of(num_tokens, seed=4), NUM_ADAPTERS, 16)
    values = draw(128, 128, dtype=dtype, seed=6, scale=0.1)
    weight = TritonDense(values).adapted(lora, plan)
    for norm in (None, Norm(128, dtype)):
        assert layer_error(weight, x, values, lora, plan, norm=norm, gated=gated) < CLOSE[dtype]
    if not gated:
        hidden = draw(num_tokens, 128, dtype=dtype, seed=9)
        expected = hidden.double() + x.double() @ values.double().T + truth(x, plan.adapters, lora)
        stream = nk.add_pending(weight.linear_add(x, nk.Stream(hidden.clone())))
        assert error(stream.hidden, expected) < CLOSE[dtype]


@outer_only
def test_products_that_have_adapters_in_their_kernel(monkeypatch):
    monkeypatch.setattr(choice, "is_hopper", lambda x: True)
    bf16 = torch.bfloat16

    def form(tokens, parts, dtype=bf16, lora_dtype=bf16, *, gated=False):
        x, values = (draw(n, 128, dtype=dtype, device="cpu") for n in (tokens, sum(parts)))
        lora = matrices(parts, 128, lora_dtype, "cpu")
        return choice.adapted_form(x, values, lora, gated=gated)

    assert isinstance(form(2, (96, 32)), Gemv)
    assert isinstance(form(3, (64, 128)), Dot)
    assert isinstance(form(64, (96, 96), gated=True), Dot)
    assert form(3, (96, 32)) is None  # a tile would be of two parts
    assert form(3, (80,)) is None
    assert form(65, (64, 64)) is None
    assert form(0, (64, 64)) is None
    assert form(3, (64, 64), lora_dtype=torch.float32) is None
    assert form(3, (64, 64), torch.float32, torch.float32) is None
    assert form(3, (16, 16, 16, 16)) is None
    monkeypatch.setattr(choice, "is_hopper", lambda x: False)
    assert form(3, (64, 64)) is None


SIZES = dict.fromkeys(
    ("num_tokens", "tiles", "a_tiles", "N", "M", "a_stride", "b_stride", "lora_stride"), "i32"
) | {"eps": "fp32", "out": "*fp32", "hidden": "*fp32"}
INTEGERS = ("adapters", "places", "tile_adapters", "present", "ready")


def compiled(kernel, capability, dtype="bf16", warps=4, types=None, **constants):
    types = dict(types or {})
    for name in kernel.arg_names:
        if name in types:
            continue
        if name in INTEGERS:
            types[name] = "*i32"
        elif name in SIZES:
            types[name] = SIZES[name]
        elif name.islower():
            types[name] = f"*{dtype}"
    if "PDL" in kernel.arg_names:
        constants["PDL"] = capability >= 90
    divisible = [
        name for name in types if types[name].startswith("*") or "stride" in name or name == "N"
    ]
    made = compile_for(kernel, types, constants, capability, divisible, num_warps=warps)
    assert_fits(made, capability)
    return made


@outer_only
@pytest.mark.parametrize("capability", [80, 90, 100])
class TestAheadOfTime:
    def test_plan(self, capability):
        for tokens in (64, 1024):
            compiled(triton_plan.plan_kernel, capability, S=8, TILE=16, TOKENS=tokens, BLOCK_S=16)

    @pytest.mark.parametrize(("dtype", "block_m"), [("bf16", 16), ("bf16", 64), ("fp32", 16)])
    def test_shrink(self, capability, block_m, dtype):
        compiled(
            triton_shrink.shrink_kernel, capability, dtype, K=4096, ROWS=48, BLOCK_M=block_m,
            BLOCK_N=16, BLOCK_K=triton_shrink.BLOCK_K, SPAN=512,
        )  # fmt: skip

    @pytest.mark.parametrize("norm", [False, True])
    def test_shrink_of_few(self, capability, norm):
        made = compiled(
            triton_shrink.shrink_few_kernel, capability, K=4096, ROWS=48,
            SPAN=4096, BLOCK_K=4096, NORM=norm,
        )  # fmt: skip
        if capability == 90:  # A is loaded before the wait
            before, after = made.ptx.split("griddepcontrol.wait", 1)
            assert before.count("ld.global") > after.count("ld.global") > 0

    @pytest.mark.parametrize(("block_m", "rank", "splits"), [(16, 16, 8), (64, 64, 2)])
    def test_expand(self, capability, block_m, rank, splits):
        blocks = {"BLOCK_M": block_m, "BLOCK_N": triton_expand.BLOCK_N, "BLOCK_R": rank}
        warps = 8 if block_m == 64 else 4
        compiled(
            triton_expand.expand_kernel, capability, warps=warps, N0=4096, N1=1024, N2=1024, R=rank,
            ROWS=3 * rank, SPLITS=splits, **blocks,
        )  # fmt: skip
        compiled(
            triton_expand.expand_gated_kernel, capability, warps=warps, F=12288, R=rank,
            SPLITS=splits, **blocks,
        )  # fmt: skip

    @pytest.mark.parametrize("gated", [False, True])
    def test_vector_product(self, capability, gated):
        made = compiled(
            gemv_kernel, capability, warps=8, K=4096, BLOCK_K=2048, ROWS=1, TOKENS=1,
            NORM=gated, GATED=gated, RESIDUAL=not gated, BIAS=False, EVEN=True, RANK=16,
            PARTS=2 if gated else 1, SPLITS=4, N0=12288, N1=24576,
        )  # fmt: skip
        if capability == 90:  # B is loaded before the wait, as the weight
            assert "evict_first" not in made.ptx.split("griddepcontrol.wait", 1)[1]


@outer_only
@pytest.mark.parametrize("tokens", [16, 32, 64])
@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize(
    ("rows", "columns", "parts"),
    [(6144, 4096, (4096, 1024, 1024)), (4096, 4096, (4096,)), (24576, 4096, (12288, 12288)),
     (4096, 12288, (4096,)), (2048, 1024, (2048,))],
)  # fmt: skip
def test_dot_with_adapters_compiles_ahead_of_time(rows, columns, parts, rank, tokens):
    gated = len(parts) == 2
    form = choose_adapted(tokens, rows, columns, gated)
    types = {"out": "*fp32"} if form.split_k > 1 else {"out": "*bf16"}
    width = rank * (2 if gated else 1)
    made = compiled(
        dot_kernel, 90, warps=form.warps, types=types, K=columns, BLOCK_M=form.block_m,
        BLOCK_N=form.block_n, BLOCK_K=form.block_k, SPLIT_K=form.split_k, STAGES=form.stages,
        GATED=gated, SWAP=form.swap, EVEN=True, TRIGGER=form.trigger, PREFETCH=form.prefetch,
        RANK=rank, PARTS=len(parts), N0=parts[0], N1=sum(parts[:2]),
        BLOCK_S=64 // min(64, width), BLOCK_W=min(64, width),
    )  # fmt: skip
    assert made.ptx.count("wgmma.mma_async") > 1
