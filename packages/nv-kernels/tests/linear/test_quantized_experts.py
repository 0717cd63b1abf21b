"""Experts of records: the definition against plain arithmetic, and each device against it."""

from dataclasses import replace
from typing import NamedTuple

import nv_kernels as nk
import pytest
import torch
import triton
import triton.language as tl
from ahead_of_time import assert_fits, compile_for
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels import reference
from nv_kernels.cpp.library import find_compiler
from nv_kernels.cpp.quantized_experts import CppQuantizedExperts
from nv_kernels.linear.experts import triton_code_tiles as tiles
from nv_kernels.linear.experts import triton_gate, triton_quantized, triton_route, triton_weight
from nv_kernels.linear.experts import weight as weight_definitions
from nv_kernels.linear.experts.code_stack import lay_out_stack
from nv_kernels.linear.experts.gate import SWIGLU, Gate
from nv_kernels.linear.experts.quantized import inputs_of
from nv_kernels.linear.experts.triton_code_sums import round_to_e4m3
from quantized_cases import RECORDS, blocks, draw, fp8, grouped, int8

needs_compiler = pytest.mark.skipif(not find_compiler(), reason="needs a C++ compiler")
CLAMPED = Gate(alpha=1.702, limit=0.7, shift=1.0)
"""A gate whose limit some of the products exceed."""
KINDS = ("fast", "batch_invariant")
CLOSE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 5e-3}
"""Of a layer: two products, and what is rounded between them, as in test_experts."""
E4M3_SUMS = 2**-13
"""The same where Hopper's tensor cores multiply e4m3: they keep about 14 bits of a sum of 128
columns. It counts for fp32 alone, as the others are wider."""
MAKERS = {
    "4 bits": lambda n, k, seed: grouped(n, k, bits=4, group=32, seed=seed),
    "4 bits, zero points": lambda n, k, seed: grouped(
        n, k, bits=4, group=32, offset="zero points", seed=seed
    ),
    "4 bits, floats": lambda n, k, seed: grouped(n, k, bits=4, group=k, offset="floats", seed=seed),
    "8 bits": lambda n, k, seed: grouped(n, k, bits=8, group=16, seed=seed),
    "fp8, weight only": lambda n, k, seed: fp8(n, k, by="row", inputs=None, seed=seed),
    "fp8, tokens": lambda n, k, seed: fp8(n, k, by="row", inputs="token", seed=seed),
    "fp8, static": lambda n, k, seed: fp8(n, k, by="row", inputs=0.01, seed=seed),
    "fp8, blocks": lambda n, k, seed: fp8(n, k, by="block", inputs="block", seed=seed),
    "fp8, blocks, weight only": lambda n, k, seed: fp8(n, k, by="block", inputs=None, seed=seed),
    "int8": lambda n, k, seed: int8(n, k, seed=seed),
}
"""Records of every kind on a card, with sizes that divide by 32."""
CPU_MAKERS = {name: lambda n, k, _, make=make: make(n, k) for name, make in RECORDS.items()}


def plain(make, num_experts, size, width, *, dtype=torch.float32, gate=SWIGLU, device="cpu"):
    """Experts of a kind; with another gate than SwiGLU also with biases."""

    def stack(rows, columns, seed):
        return tuple(
            moved(make(rows, columns, seed + expert), device) for expert in range(num_experts)
        )

    made = nk.QuantizedExperts(
        stack(width, size, 0), stack(width, size, 50), stack(size, width, 100), gate=gate
    )
    if gate == SWIGLU:
        return made
    biases = draw(num_experts, 2 * width, seed=11), draw(num_experts, size, seed=12)
    first, last = (bias.to(dtype).to(device) for bias in biases)
    return replace(made, gate_up_bias=first, down_bias=last)


def on(by, device):
    """The experts with their records on a device."""
    stacks = {
        name: tuple(moved(each, device) for each in each_stack)
        for name, each_stack in by.records.items()
    }
    return replace(by, **stacks)


def moved(record, device):
    """The record with its tensors on a device."""
    tensors = {k: v.to(device) for k, v in vars(record).items() if isinstance(v, torch.Tensor)}
    return replace(record, **tensors)


def dense(by):
    """Experts of the records' values."""

    def values(records):
        return torch.stack([each.dense(torch.float32) for each in records])

    gate_up = torch.cat((values(by.gates), values(by.ups)), dim=1)
    return nk.DenseExperts(gate_up, values(by.downs), by.gate_up_bias, by.down_bias, by.gate)


def error(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def with_one_product(by, part):
    """The experts with one product that quantizes its inputs, so that no rounded code goes on.

    One ulp of an input can flip a code where activations are quantized, which the next product
    multiplies: a layer of two such products is compared in two parts. Returns them and a function
    that draws tokens. For the last product these pick single values of up, and gates are so large
    that their sigmoid is 1: what it multiplies is not rounded.
    """
    size, width = by.downs[0].shape
    count = by.num_experts

    def stack(rows, columns, seed):
        return tuple(MAKERS["8 bits"](rows, columns, seed + each) for each in range(count))

    if part == "first":
        return replace(by, downs=stack(size, width, 200)), draw
    ones = torch.full((width, size), 129, dtype=torch.uint8)
    gate = nk.Grouped(ones, torch.full((width, size // 16), 16.0).bfloat16(), None, 8)
    others = {"gates": (gate,) * count, "ups": stack(width, size, 400)}

    def one_of_each(tokens, columns):
        return torch.eye(columns)[torch.arange(tokens) * 7 % columns] * 8

    return replace(by, **others), one_of_each


def parts_of(by):
    """The parts in which experts are compared."""
    return ("first", "last") if inputs_of(by.downs[0]) else ("both",)


def is_coded_fp8(records):
    """Whether e4m3 multiplies e4m3."""
    return isinstance(records[0], nk.Fp8) and records[0].inputs is not None


def check_against_definition(make_experts, by, tokens, top_k, dtype, factor=0.25):
    """Compare experts with their definition, in parts whose inputs are equal bit for bit."""
    device = by.device
    for part in parts_of(by):
        some, make_x = (by, draw) if part == "both" else with_one_product(by, part)
        some = on(some, device)
        x = (make_x(tokens, by.downs[0].shape[0]) * factor).to(dtype).to(device)
        logits = draw(tokens, by.num_experts, seed=3).to(dtype).to(device)
        experts = make_experts(some)
        assert experts is not some  # which would be compared with itself
        routing = experts.route(logits, top_k, True)
        found = experts.mix(x, routing)
        assert found.dtype == dtype
        adds_e4m3 = device.type == "cuda" and any(map(is_coded_fp8, some.records.values()))
        close = max(CLOSE[dtype], E4M3_SUMS) if adds_e4m3 else CLOSE[dtype]
        assert error(found, some.mix(x, routing)) < close, part


def routed(tokens, num_experts, top_k, dtype=torch.float32, device="cpu"):
    logits = draw(tokens, num_experts, seed=3).to(dtype).to(device)
    return reference.route(logits, top_k, True)


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


class TestDefinition:
    @outer_only
    @pytest.mark.parametrize("gate", [SWIGLU, CLAMPED])
    @pytest.mark.parametrize(
        "name", ["4 bits, zero points", "8 bits", "fp8, blocks, weight only", "fp8, weight only"]
    )
    def test_without_quantized_inputs_it_is_that_of_the_values(self, name, gate):
        by = plain(MAKERS[name], 4, 64, 32, gate=gate)
        x, routing = draw(9, 64), routed(9, 4, 2)
        assert error(by.mix(x, routing), dense(by).mix(x, routing)) < 1e-6

    @outer_only
    @pytest.mark.parametrize("name", ["fp8, tokens", "fp8, static", "fp8, blocks", "int8"])
    def test_quantized_inputs_are_those_of_the_records(self, name):
        """Token by token: each product by the record's own definition."""
        by = plain(MAKERS[name], 4, 64, 32)
        x, routing = draw(5, 64), routed(5, 4, 2)
        expected = torch.zeros_like(x)
        for token in range(5):
            for expert, scale in zip(routing.experts[token], routing.weights[token], strict=True):
                row = x[token : token + 1]
                gate, up = by.gates[expert].linear(row), by.ups[expert].linear(row)
                gated = torch.nn.functional.silu(gate) * up
                expected[token] += scale * by.downs[expert].linear(gated)[0]
        found = by.mix(x, routing)
        assert error(found, expected) < 2e-3  # a tie of a code may fall to the other side
        assert error(found, dense(by).mix(x, routing)) > 5e-3  # which does not quantize tokens

    @outer_only
    def test_records_that_differ_are_refused(self):
        by = plain(MAKERS["fp8, tokens"], 3, 64, 32)
        other = replace(by.ups[0], inputs=None)
        with pytest.raises(ValueError, match=r"ups has 3 records of .*alike in class, shape and"):
            replace(by, ups=(other, *by.ups[1:]))
        with pytest.raises(ValueError, match=r"gates has 2 records of .* there must be 3"):
            replace(by, gates=by.gates[1:])


class TestOnACPU:
    @outer_only
    @needs_compiler
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("tokens", [1, 3, 60, 512])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name", CPU_MAKERS)
    def test_layer(self, name, kind, tokens, dtype):
        """With 512 tokens some experts have more than 128 entries, which are taken in two parts."""
        by = plain(CPU_MAKERS[name], 3, 256, 256, dtype=dtype)
        make = nk.arithmetic(kind).quantized_experts
        assert isinstance(make(by), CppQuantizedExperts)
        check_against_definition(make, by, tokens, 2, dtype)

    @outer_only
    @needs_compiler
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("tokens", [2, 40])
    @pytest.mark.parametrize("gate", [SWIGLU, CLAMPED])
    @pytest.mark.parametrize("name", ["4 bits", "4 bits, floats", "fp8, tokens", "fp8, blocks"])
    def test_odd_widths_biases_and_gates(self, name, gate, tokens, dtype):
        by = plain(MAKERS[name], 4, 224, 160, dtype=dtype, gate=gate)
        check_against_definition(nk.arithmetic("fast").quantized_experts, by, tokens, 3, dtype)

    @outer_only
    @needs_compiler
    @pytest.mark.parametrize("name", ["4 bits", "fp8, blocks", "fp8, tokens", "int8"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_bits_do_not_depend_on_the_batch(self, name, dtype):
        by = plain(MAKERS[name], 4, 64, 96, dtype=dtype)
        experts = nk.arithmetic("batch_invariant").quantized_experts(by)
        x, routing = draw(600, 64).to(dtype), routed(600, 4, 2, dtype)
        whole = experts.mix(x, routing)
        for some in (slice(0, 1), slice(5, 8), slice(130, 261), slice(511, 600)):
            part = routing._replace(
                experts=routing.experts[some].contiguous(),
                weights=routing.weights[some].contiguous(),
            )
            assert torch.equal(experts.mix(x[some], part), whole[some])

    @outer_only
    @needs_compiler
    def test_blocks_are_used_where_they_lie_and_kinds_may_differ(self):
        kinds = {"gates": "Q4_K", "ups": "Q4_K", "downs": "Q6_K"}
        made = plain(lambda n, k, seed: blocks("Q4_K", n, k, seed=seed), 3, 256, 256)
        downs = tuple(blocks(kinds["downs"], 256, 256, seed=seed) for seed in range(3))
        by = replace(made, downs=downs)
        experts = nk.arithmetic("fast").quantized_experts(by)
        x, routing = draw(7, 256), routed(7, 3, 2)
        assert error(experts.mix(x, routing), by.mix(x, routing)) < 3e-6
        for down in by.downs:
            down.parts[0].zero_()  # the experts read these bytes, not a copy
        assert experts.mix(x, routing).count_nonzero() == 0

    @outer_only
    def test_no_tokens(self):
        experts = nk.arithmetic("fast").quantized_experts(plain(MAKERS["4 bits"], 2, 64, 32))
        assert experts.mix(torch.empty(0, 64), routed(0, 2, 1)).shape == (0, 64)

    @outer_only
    def test_another_dtype_runs_the_definition(self):
        by = plain(MAKERS["8 bits"], 2, 64, 32)
        experts = nk.arithmetic("fast").quantized_experts(by)
        x, routing = draw(3, 64).half(), routed(3, 2, 1, torch.float16)
        assert torch.equal(experts.mix(x, routing), by.mix(x, routing))

    @outer_only
    def test_an_order_of_columns_runs_the_definition(self):
        made = plain(MAKERS["4 bits"], 2, 64, 32)
        order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).int()
        by = replace(made, gates=tuple(replace(each, order=order) for each in made.gates))
        assert nk.arithmetic("fast").quantized_experts(by) is by
        x, routing = draw(3, 64), routed(3, 2, 1)
        assert error(by.mix(x, routing), dense(by).mix(x, routing)) < 1e-6


CARD_KINDS = {
    "fast": triton_quantized.quantized_experts,
    "batch_invariant": triton_quantized.batch_invariant_quantized_experts,
}
BLOCK_MAKERS = {
    kind: lambda n, k, seed, kind=kind: blocks(kind, n, k, seed=seed) for kind in ("Q4_K", "Q6_K")
}
"""Blocks that a card lays out as groups of 4 and of 8 bits."""


class Given(NamedTuple):
    """A router's product that is there already."""

    logits: torch.Tensor

    def partials(self, x, bias=None):
        del x, bias
        return self.logits


class Scores(NamedTuple):
    """A router."""

    weight: Given
    bias: torch.Tensor | None = None
    top_k: int = 2
    is_normalised: bool = True


class TestOnACard:
    @on_device
    @pytest.mark.parametrize("tokens", [1, 19, 150])
    @pytest.mark.parametrize("kind", CARD_KINDS)
    @pytest.mark.parametrize("name", MAKERS)
    def test_layer(self, name, kind, tokens):
        """Columns and rows that no tile divides; one token, and both ways to find entries."""
        if INTERPRETING and tokens == 150 and kind == "fast" and name != "4 bits":
            pytest.skip("one kind is enough for the order of the entries")
        by = plain(MAKERS[name], 4, 160, 96, dtype=torch.bfloat16, device=DEVICE)
        check_against_definition(CARD_KINDS[kind], by, tokens, 2, torch.bfloat16)

    @on_device
    @pytest.mark.parametrize("tokens", [2, 19])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("name", ["4 bits", "8 bits", "fp8, blocks", "fp8, tokens", "int8"])
    def test_other_dtypes_with_biases(self, name, dtype, tokens):
        by = plain(MAKERS[name], 4, 160, 96, dtype=dtype, gate=CLAMPED, device=DEVICE)
        check_against_definition(CARD_KINDS["fast"], by, tokens, 3, dtype)

    @on_device
    @pytest.mark.parametrize("name", BLOCK_MAKERS)
    def test_blocks_become_groups(self, name):
        by = plain(BLOCK_MAKERS[name], 2, 256, 256, device=DEVICE)
        check_against_definition(CARD_KINDS["fast"], by, 5, 1, torch.bfloat16, factor=2**-8)

    @on_device
    @pytest.mark.parametrize("name", ["fp8, tokens", "fp8, blocks", "fp8, static"])
    def test_e4m3_on_cards_without_it(self, name, monkeypatch):
        monkeypatch.setattr(tiles, "is_native", lambda stack, _: stack.kind == "int8")
        by = plain(MAKERS[name], 4, 160, 96, dtype=torch.bfloat16, device=DEVICE)
        check_against_definition(CARD_KINDS["fast"], by, 7, 2, torch.bfloat16)

    @on_device
    def test_every_step_and_tie_of_e4m3(self):
        wide = torch.cat([2.0 ** torch.arange(-12, 9) * (1 + step / 16) for step in range(16)])
        tiny = torch.arange(0, 40) * 2.0**-10  # multiples of half the smallest e4m3
        values = torch.cat([wide, tiny, torch.tensor([448.0, 463.9, 464.0, 1e6])])
        values = torch.cat([values, -values, torch.zeros(1024)])[:1024].to(DEVICE)
        out = torch.empty_like(values)
        rounding_kernel[(1,)](values, out, 1024)
        expected = values.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert torch.equal(out, expected)

    @on_device
    @pytest.mark.parametrize("name", ["4 bits", "fp8, tokens", "fp8, blocks", "int8"])
    def test_bits_do_not_depend_on_the_batch(self, name):
        by = plain(MAKERS[name], 4, 160, 96, dtype=torch.bfloat16, device=DEVICE)
        experts = CARD_KINDS["batch_invariant"](by)
        x = draw(90, 160).bfloat16().to(DEVICE)
        logits = draw(90, 4, seed=3).bfloat16().to(DEVICE)

        def partials(some):
            return experts.partials(x[some], experts.route(logits[some], 2, True))

        whole = partials(slice(None))
        for some in (slice(0, 1), slice(3, 8), slice(50, 90)):
            assert torch.equal(partials(some), whole[:, some])

    @on_device
    def test_no_token(self):
        experts = CARD_KINDS["fast"](plain(MAKERS["4 bits"], 2, 64, 32, device=DEVICE))
        x, logits = torch.empty(0, 64, device=DEVICE), torch.empty(0, 2, device=DEVICE)
        assert experts.partials(x, experts.route(logits, 1, True)).shape == (1, 0, 64)

    @on_device
    def test_what_no_kernel_takes_stays_as_it_is(self):
        made = plain(MAKERS["4 bits"], 2, 64, 32, device=DEVICE)
        order = torch.randperm(64).int().to(DEVICE)
        ordered = tuple(replace(each, order=order) for each in made.gates)
        mixed = (made.downs[0], moved(grouped(64, 32, bits=8, group=16), DEVICE))
        odd = tuple(moved(grouped(64, 96, bits=4, group=24), DEVICE) for _ in range(2))
        wide = plain(MAKERS["4 bits"], 2, 64, 96, device=DEVICE)
        codes = plain(MAKERS["fp8, tokens"], 2, 64, 32, device=DEVICE)
        weight_only = tuple(replace(each, inputs=None) for each in codes.ups)
        for by in (
            replace(made, gates=ordered),
            replace(made, ups=codes.ups),  # gate and up of two classes
            replace(codes, ups=weight_only),  # gate and up of which one quantizes its inputs
            replace(made, downs=mixed),
            replace(wide, downs=odd),
        ):
            assert CARD_KINDS["fast"](by) is by

    @on_device
    @pytest.mark.parametrize(("tokens", "most"), [(1, 3), (40, 3), (130, 4)])
    @pytest.mark.parametrize("kind", CARD_KINDS)
    @pytest.mark.parametrize("name", ["4 bits", "fp8, blocks", "fp8, tokens"])
    def test_launches(self, name, kind, tokens, most, monkeypatch):
        """With the router's product at most 5: tokens are quantized inside the products."""
        if not INTERPRETING:
            pytest.skip("counts what the interpreter launches")
        from triton.runtime import interpreter  # noqa: PLC0415

        for module in (triton_weight, triton_quantized):
            monkeypatch.setattr(module, "route", triton_route.route)
        experts = CARD_KINDS[kind](plain(MAKERS[name], 4, 32, 32))
        hidden, launches = draw(tokens, 32), []
        run = interpreter.GridExecutor.__call__

        def counted(self, *args, **options):
            launches.append(self.fn.__name__)
            run(self, *args, **options)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
        monkeypatch.setattr(weight_definitions, "normalise", lambda stream, _: (hidden, stream))
        scores = Scores(Given(draw(tokens, 4, seed=3)))
        stream = experts.norm_add(nk.Stream(hidden), None, scores)
        assert len(launches) <= (4 if kind == "batch_invariant" else most), launches
        assert stream.pending.shape == (2, tokens, 32)


@triton.jit
def rounding_kernel(values, out, COUNT: tl.constexpr):
    """Round to e4m3."""
    at = tl.arange(0, COUNT)
    tl.store(out + at, round_to_e4m3(tl.load(values + at)))


SHAPES = {"gate and up": (768, 2048, True), "down": (2048, 768, False)}
"""Of an expert of Qwen3-30B-A3B: N, K, and whether it is gated."""


@outer_only
class TestAheadOfTime:
    @pytest.mark.parametrize("capability", [80, 90, 100])
    @pytest.mark.parametrize(
        ("name", "tile", "shape"),
        [
            ("4 bits", 0, "gate and up"), ("4 bits", 16, "down"), ("4 bits", 128, "gate and up"),
            ("4 bits, zero points", 64, "gate and up"), ("8 bits", 128, "gate and up"),
            ("fp8, blocks", 0, "down"), ("fp8, blocks", 16, "gate and up"),
            ("fp8, blocks", 128, "gate and up"), ("fp8, tokens", 0, "gate and up"),
            ("fp8, tokens", 128, "gate and up"), ("fp8, weight only", 64, "gate and up"),
            ("int8", 64, "gate and up"),
        ],
    )  # fmt: skip
    def test_kernels(self, name, shape, tile, capability):
        outputs, columns, gated = SHAPES[shape]
        stack = lay_out_stack([AHEAD[name](outputs, columns)])
        has_codes = stack.kind == "e4m3" and stack.inputs is not None
        native = stack.kind == "int8" or (has_codes and capability >= 90)
        code = {"e4m3": "*fp8e4nv" if native else "*u8", "int8": "*i8"}.get(stack.kind, "*u8")
        scale = "*bf16" if stack.is_grouped else "*fp32"
        offset = scale if stack.offset is None else "*i16"
        pointers = {
            "x": "*bf16", "codes": code, "w_scale": scale, "offset": offset, "scales": "*bf16",
            "out": "*bf16",
        }  # fmt: skip
        kernel, order, more = kernel_of(tile)
        pointers |= order
        names = ("GROUP", "GROUPS", "KIND", "OFFSET", "BLOCKS", "INPUTS")
        gate_names = ("GATED", "ALPHA", "LIMIT", "SHIFT")
        constants = dict(zip(names, stack.constants, strict=True)) | dict(
            zip(gate_names, triton_gate.constants(SWIGLU if gated else None), strict=True)
        )
        compiled = compile_for(
            kernel,
            pointers | {"fixed": "fp32", "num_tokens": "i32", "STRIDE": "i32"},
            constants | more
            | {"N": outputs, "PADDED": outputs, "K": columns, "TOP_K": 8, "bias": None,
               "BLOCK_M": tile or tiles.ENTRY_ROWS, "STAGES": tiles.STAGES, "NATIVE": native,
               "BLOCK_N": tiles.BLOCK_N if tile else tiles.ENTRY_BLOCK_N, "ASM": True,
               "PDL": capability >= 90},
            capability,
            divisible=(*pointers, "STRIDE"),
            num_warps=8 if tile >= tiles.WIDE_TILE else 4,
        )  # fmt: skip
        assert_fits(compiled, capability)
        assert "atom" not in compiled.ptx
        assert ("griddepcontrol.wait" in compiled.ptx) == (capability >= 90)


def kernel_of(tile):
    """The kernel of a height of tile, the types of its order, and its own constants."""
    if not tile:
        return tiles.entry_codes_kernel, {"experts": "*i32"}, {}
    if tile <= triton_weight.MOST_SLOTS_TILE // 4:
        return tiles.slots_codes_kernel, {"slots": "*i16"}, {"TOKENS": 128, "EARLY": True}
    return tiles.sorted_codes_kernel, {"places": "*i32", "tile_experts": "*i32"}, {}


AHEAD = {
    "4 bits": lambda n, k: grouped(n, k, bits=4, group=128),
    "4 bits, zero points": lambda n, k: grouped(n, k, bits=4, group=128, offset="zero points"),
    "8 bits": lambda n, k: grouped(n, k, bits=8, group=32),
    "fp8, tokens": lambda n, k: fp8(n, k, by="row", inputs="token"),
    "fp8, blocks": lambda n, k: fp8(n, k, by="block", inputs="block"),
    "fp8, weight only": lambda n, k: fp8(n, k, by="row", inputs=None),
    "int8": int8,
}
