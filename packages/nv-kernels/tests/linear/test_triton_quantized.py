"""Quantized weights on a card, against the definitions of their records."""

from dataclasses import replace
from functools import partial

import nv_kernels as nk
import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from decoder_layer import RMS
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels.elementwise.triton_norm import add_rms_norm
from nv_kernels.launch.card import is_hopper
from nv_kernels.linear.quantized import triton_tokens
from nv_kernels.linear.quantized.tuned import (
    TUNED,
    Groups,
    Library,
    Ring,
    Tile,
    Warps,
    choose,
    invariant_tile,
    tile_for,
)
from nv_kernels.linear.triton import quantized_codes, quantized_grouped
from nv_kernels.linear.triton import quantized_weight as made
from nv_kernels.linear.triton.product import gluon_module
from nv_kernels.linear.triton.quantized_layout import LaidOut, lay_out_fp8, lay_out_grouped
from quantized_cases import RECORDS, draw, fp8, grouped
from torch.nn import functional

card_only = pytest.mark.skipif(INTERPRETING, reason="needs a card")
TOKENS = (1, 2, 3, 16, 17, 64, 65, 256, 1000, 4096)
FEW, MANY = ((3,), (66,)) if INTERPRETING else (TOKENS, TOKENS)
SHAPES = [(128, 256), (140, 300)] if INTERPRETING else [(1024, 2048), (130, 300), (6144, 4096)]
BF16 = torch.bfloat16
WEIGHT_ONLY = {
    **{name: make for name, make in RECORDS.items() if name[0].isdigit() or "only" in name},
    "8 bits, floats": partial(grouped, bits=8, group=16, offset="floats"),
    "4 bits, groups of 16": partial(grouped, bits=4, group=16, offset="zero points"),
}  # fmt: skip
BY_CODES = {
    **{name: RECORDS[name] for name in ("fp8, tokens", "fp8, static", "fp8, blocks", "int8")},
    "fp8, rows by groups of x": partial(fp8, by="row", inputs="block"),
    "fp8, blocks by tokens": partial(fp8, by="block", inputs="token"),
}


def to_device(record):
    """The record with its tensors on the tests' device."""
    tensors = {name: value.to(DEVICE) for name, value in vars(record).items()
               if isinstance(value, torch.Tensor)}  # fmt: skip
    return replace(record, **tensors)


def columns_of(name, columns):
    """Columns that the record's groups divide."""
    return columns if "bits" not in name or columns % 128 == 0 else columns // 32 * 32 + 96


def tokens_of(tokens, columns, seed=5):
    return draw(tokens, columns, seed=seed, scale=0.1).to(BF16).to(DEVICE)


def error(actual, expected):
    assert actual.shape == expected.shape
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm())


def in_fp64(x, values, bias):
    assert bias is None
    return x.double() @ values.double().T


def summed(y):
    return y.float().sum(0) if y.dim() == 3 else y


def gated(y):
    gate, up = y.double().chunk(2, dim=-1)
    return functional.silu(gate) * up


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


@on_device
@pytest.mark.parametrize("inputs", ["token", "block", 0.02, "int8"])
@pytest.mark.parametrize("columns", [256, 300])
def test_tokens_are_quantized_as_defined(columns, inputs):
    x = draw(7, columns).to(BF16)
    x[2], x[3, :128] = 0.0, 0.0
    x[5] *= 1e-33
    x[4, 5] = -9.0  # int8's scale puts it exactly on -127.5
    op = triton_tokens.quantize_tokens_int8
    want = nk.reference.quantize_tokens_int8
    if inputs != "int8":
        op = partial(triton_tokens.quantize_tokens_fp8, inputs=inputs)
        want = partial(nk.reference.quantize_tokens_fp8, inputs=inputs)
    for values in (x, x.half(), x.float()):
        codes, scales = op(values.to(DEVICE))
        want_codes, want_scales = want(values)
        assert torch.equal(scales.cpu(), want_scales)
        assert codes.dtype == want_codes.dtype
        assert torch.equal(codes.cpu().view(torch.uint8), want_codes.view(torch.uint8))


@on_device
@pytest.mark.parametrize("partials", [None, 1, 3])
@pytest.mark.parametrize("columns", [256, 300])
def test_a_norm_writes_the_codes_of_what_it_norms(columns, partials):
    hidden = tokens_of(5, columns)
    norm = RMS(draw(columns, seed=3).to(BF16).to(DEVICE), 1e-6)
    pending = None
    if partials is not None:
        pending = tokens_of(5, columns, seed=6)
        if partials > 1:
            pending = draw(partials, 5, columns, seed=7).to(DEVICE)
    x, residual = (hidden, None) if pending is None else (pending, hidden)
    normed, total = add_rms_norm(x, residual, norm.weight, norm.eps)
    for code, inputs in ((torch.int8, "token"), (torch.float8_e4m3fn, "block")):
        codes, scales, stream = triton_tokens.norm_tokens(hidden, pending, norm, code, inputs)
        want = nk.reference.quantize_tokens_int8(normed)
        if code != torch.int8:
            want = nk.reference.quantize_tokens_fp8(normed, inputs)
        assert torch.equal(stream, total)
        # A sum in another order may move a value by one step of bf16, and with a row's largest
        # its scale: each code is the nearest to a value as near as that.
        step = normed.float().abs() * 2.0**-7
        assert (scales / want[1] - 1).abs().max() <= 2.0**-7
        wide = made_wide(scales, columns)
        values = codes.float() * wide
        half = 0.5 * wide if code == torch.int8 else torch.maximum(
            values.abs() * 2.0**-4, wide * 2.0**-10)  # fmt: skip
        assert ((values - normed.float()).abs() <= step + 1.001 * half).all()


def made_wide(scales, columns):
    return scales if scales.shape[1] == 1 else scales.repeat_interleave(128, 1)[:, :columns]


@on_device
@pytest.mark.parametrize("name", WEIGHT_ONLY)
@pytest.mark.parametrize(("rows", "columns"), [(128, 256), (70, 300)])
def test_dequantized_values_are_those_of_the_record(rows, columns, name):
    record = to_device(WEIGHT_ONLY[name](rows, columns_of(name, columns)))
    lay_out = lay_out_fp8 if isinstance(record, nk.Fp8) else lay_out_grouped
    laid = lay_out(record)
    for dtype in (BF16, torch.float16):
        assert torch.equal(quantized_grouped.dequantize(laid, dtype), record.dense(dtype))
    if rows == 128:  # without padding
        assert laid.codes.nbytes == record.codes.nbytes


@on_device
@pytest.mark.parametrize("name", [*WEIGHT_ONLY, *BY_CODES])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products_are_the_definition_s(rows, columns, name):
    records = WEIGHT_ONLY | BY_CODES
    record = to_device(records[name](rows, columns_of(name, columns)))
    weight = made.quantized_weight(record)
    bias = draw(rows, seed=8).to(BF16).to(DEVICE)
    for tokens in FEW:
        x = tokens_of(tokens, record.shape[1])
        want = record.product(x, in_fp64, None)
        assert error(summed(weight.partials(x)), want) < 5e-3, tokens
        assert error(weight.linear(x, bias), want.double() + bias) < 5e-3
        scores = weight.logits(x)
        assert scores.dtype == torch.float32
        assert error(scores, want) < 5e-3
        assert error(weight.gated_linear(x), gated(want)) < 8e-3
        assert error(weight.gated_linear(x, bias), gated(want.double() + bias)) < 8e-3
        if not INTERPRETING:
            assert torch.equal(weight.partials(x), weight.partials(x))
    assert weight.linear(tokens_of(5, record.shape[1])[:0]).shape == (0, rows)


@on_device
@pytest.mark.parametrize("name", ["4 bits, zero points", "fp8, tokens", "fp8, blocks", "int8"])
def test_a_layer_s_methods(name):
    hidden = 256 if INTERPRETING else 4096
    record = to_device(RECORDS[name](hidden, hidden))
    weight = made.quantized_weight(record)
    norm = RMS((1 + draw(hidden, seed=3) / 9).to(BF16).to(DEVICE), 1e-6)
    bias = draw(hidden, seed=8).to(BF16).to(DEVICE)
    for tokens in MANY:
        stream = nk.Stream(tokens_of(tokens, hidden), tokens_of(tokens, hidden, seed=9))
        normed, total = nk.normalise(stream, norm)
        want = record.product(normed, in_fp64, None)
        out, after = weight.norm_linear(stream, norm)
        assert torch.equal(after.hidden, total.hidden)
        assert after.pending is None
        assert error(summed(out), want) < 8e-3
        assert error(weight.norm_linear(stream, norm, bias)[0], want + bias) < 8e-3
        assert error(weight.norm_gated_linear(stream, norm)[0], gated(want)) < 1.2e-2
        biased = weight.norm_gated_linear(stream, norm, bias)[0]
        assert error(biased, gated(want + bias)) < 1.2e-2
        x = tokens_of(tokens, hidden, seed=10)
        want = record.product(x, in_fp64, None)
        for rank_sum in (None, nk.RankSum(lambda y: y.clone())):
            added = weight.linear_add(x, nk.Stream(stream.hidden.clone()), None, rank_sum)
            got = added.hidden.float() if added.pending is None else (
                added.hidden.float() + summed(added.pending)
            )  # fmt: skip
            assert error(got, want + stream.hidden.float()) < 5e-3


@on_device
def test_a_gated_product_of_the_library(monkeypatch):
    """Its form is chosen apart: alone the same matrix may be split along K."""
    weight = made.quantized_weight(to_device(RECORDS["fp8, tokens"](128, 256)))

    def chosen(record, num_tokens, rows, columns, gated=False):
        return Library() if gated else Tile(64, 64, 2, 3, 4)

    def library(self, codes, scales):
        return (codes.float() * scales) @ (self.codes.float() * self.scale[:, None]).T

    monkeypatch.setattr(made, "choose", chosen)
    monkeypatch.setattr(made.TritonCodes, "_library_fits", lambda *_: True)
    monkeypatch.setattr(made.TritonCodes, "_library", library)
    x = tokens_of(5, 256)
    assert weight.partials(x).shape == (2, 5, 128)
    assert error(weight.gated_linear(x), gated(summed(weight.partials(x)))) < 5e-3


@on_device
def test_columns_in_an_order():
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1)).int()
    record = to_device(replace(grouped(128, 256, bits=4, group=128), order=order))
    weight = made.quantized_weight(record)
    for tokens in FEW:
        x = tokens_of(tokens, 256)
        assert error(weight.linear(x), record.product(x, in_fp64, None)) < 5e-3


@on_device
@pytest.mark.parametrize("name", ["4 bits, zero points", "fp8, tokens", "fp8, blocks", "int8"])
def test_a_token_s_bits_do_not_depend_on_its_batch(name):
    rows, columns = (64, 1152) if INTERPRETING else (1024, 4096)
    record = to_device(RECORDS[name](rows, columns))
    weight = made.batch_invariant_quantized_weight(record)
    most = 66 if INTERPRETING else 1000
    x, bias = tokens_of(most, columns), draw(rows, seed=8).to(BF16).to(DEVICE)
    norm = RMS(draw(columns, seed=3, scale=0.1).to(BF16).to(DEVICE), 1e-6)

    def everything(x):
        product = in_order(weight.partials(x)).to(BF16)
        normed, _ = weight.norm_linear(nk.Stream(x), norm)
        return (
            weight.linear(x), product, weight.logits(x), weight.linear(x, bias),
            weight.gated_linear(x), in_order(normed).to(BF16),
            weight.norm_gated_linear(nk.Stream(x), norm)[0],
            weight.norm_linear(nk.Stream(x), norm, bias)[0],
        )[: 4 if INTERPRETING else 8]  # fmt: skip

    whole = everything(x)
    assert torch.equal(whole[0], whole[1])
    want = record.product(x, in_fp64, None)
    assert error(whole[0], want) < 5e-3
    assert error(whole[3], want.double() + bias) < 5e-3
    for tokens in (2,) if INTERPRETING else (1, 2, 17, 64, 65, 256, 257, 600):
        for got, want in zip(everything(x[-tokens:]), whole, strict=True):
            assert torch.equal(got, want[-tokens:]), tokens
    assert weight.partials(x[:2]).dim() == 3


def in_order(partials):
    if partials.dim() == 2:
        return partials
    total = partials[0]
    for part in partials[1:]:
        total = total + part
    return total


@outer_only
def test_deterministic_mode_has_no_kernel_of_one_token(monkeypatch):
    monkeypatch.setattr(made, "grouped_fits", lambda *_, **__: True)
    laid = LaidOut(torch.empty(0), torch.ones(32, 4096, dtype=BF16), None, "4", 4096, 4096, 128)
    x = torch.zeros(1, 4096, dtype=BF16)
    assert isinstance(made.TritonGrouped(laid)._fused(x), Warps)
    assert made.BatchInvariantTritonGrouped(laid)._fused(x) is None


@on_device
def test_a_record_that_no_kernel_takes_stays_itself():
    record = to_device(grouped(64, 144, bits=4, group=48))
    assert made.quantized_weight(record) is record
    x = tokens_of(3, 144)
    weight = made.batch_invariant_quantized_weight(record)
    assert error(weight.linear(x), record.product(x, in_fp64, None)) < 5e-3


@on_device
def test_the_ops_choose_these():
    assert nk.quantized_weight._find("cuda") is made.quantized_weight
    find = nk.batch_invariant_quantized_weight._find
    assert find("cuda") is made.batch_invariant_quantized_weight
    assert nk.quantize_tokens_int8._find("cuda") is triton_tokens.quantize_tokens_int8
    assert nk.quantize_tokens_fp8._find("cuda") is triton_tokens.quantize_tokens_fp8


@pytest.mark.gpu
@card_only
@pytest.mark.parametrize("trigger", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 9, 17, 64])
def test_rings(tokens, trigger):
    if not is_hopper(draw(1).to(DEVICE)) or gluon_module("quantized_slab") is None:
        pytest.skip("needs Gluon and Hopper")
    few, many = gluon_module("quantized_slab"), gluon_module("quantized_codes_slab")
    block_m = next(size for size in (8, 16, 32, 64) if size >= tokens)
    x = tokens_of(tokens, 3072)
    for offset in (None, "zero points"):
        record = to_device(grouped(512, 3072, bits=4, group=128, offset=offset))
        want, laid = record.product(x, in_fp64, None), lay_out_grouped(record)
        for split_k, depth in ((1, 4), (6, 1), (3, 8)):
            form = Ring(block_m, split_k, 3, depth, trigger=trigger)
            assert few.grouped_slab_fits(form, x, laid, gated=False)
            assert error(summed(few.grouped_slab(form, x, laid)), want) < 4e-3
        form = Ring(block_m, 1, 3, 2, trigger=trigger)
        assert error(few.grouped_slab(form, x, laid, gated=True), gated(want)) < 8e-3
    for make in BY_CODES.values():
        record = to_device(make(512, 3072))
        weight, want = made.quantized_weight(record), record.product(x, in_fp64, None)
        codes, scales = weight._quantized(x)
        for split_k, stages, rows in ((1, 4, 64), (6, 6, 64), (24, 6, 64), (2, 3, 128)):
            form = Ring(block_m, split_k, stages, rows=rows, trigger=trigger)
            tensors = codes, scales, weight.codes, weight.scale
            assert many.codes_slab_fits(form, codes, weight.codes, gated=True)
            assert error(summed(many.codes_slab(form, *tensors, dtype=BF16)), want) < 4e-3
            if split_k == 1:
                y = many.codes_slab(form, *tensors, dtype=BF16, gated=True)
                assert error(y, gated(want)) < 8e-3


@pytest.mark.gpu
@card_only
@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [None, "zero points"])
def test_one_token_in_the_forms_of_warps(offset, scale):
    if not is_hopper(draw(1).to(DEVICE)) or gluon_module("quantized_few") is None:
        pytest.skip("needs Gluon and Hopper")
    module, x = gluon_module("quantized_few"), tokens_of(1, 3072)
    record = to_device(grouped(512, 3072, bits=4, group=128, offset=offset))
    record = replace(record, scale=record.scale.to(scale))
    want, laid = record.product(x, in_fp64, None), lay_out_grouped(record)
    residual = tokens_of(1, 512, seed=6)
    for form in (Warps(1, 2, 2, 3), Warps(2, 1, 1, 6, 8), Warps(3, 2, 2, 1, 4, 3),
                 Warps(2, 2, 1, 2, 4, trigger=1), Warps(1, 1, 3, 1, 8, trigger=3)):  # fmt: skip
        assert module.grouped_few_fits(form, x, laid, gated=False)
        assert error(summed(module.grouped_few(form, x, laid)), want) < 4e-3
        if form.split_k == 1:
            y = module.grouped_few(form, x, laid, residual=residual)
            assert error(y, want + residual) < 4e-3
        if form.split_k == 1 and form.units == 2 and form.groups < 3:
            assert module.grouped_few_fits(form, x, laid, gated=True)
            y = module.grouped_few(form, x, laid, gated=True)
            assert error(y, gated(want)) < 8e-3


@pytest.mark.gpu
@card_only
@pytest.mark.parametrize("partials", [0, 1, 3])
def test_one_token_is_added_and_normed_in_its_product(partials):
    record = to_device(grouped(4096, 4096, bits=4, group=128, offset=None))
    weight, hidden = made.quantized_weight(record), tokens_of(1, 4096)
    norm = RMS((1 + draw(4096, seed=3) / 9).to(BF16).to(DEVICE), 1e-6)
    pending = draw(partials, 1, 4096, seed=7).to(DEVICE) if partials else None
    normed, total = nk.normalise(nk.Stream(hidden, pending), norm)
    want = record.product(normed, in_fp64, None)
    out, after = weight.norm_linear(nk.Stream(hidden, pending), norm)
    assert torch.equal(after.hidden, total.hidden)
    assert after.pending is None
    assert error(summed(out), want) < 5e-3
    y, after = weight.norm_gated_linear(nk.Stream(hidden, pending), norm)
    assert torch.equal(after.hidden, total.hidden)
    assert error(y, gated(want)) < 1e-2


@pytest.mark.gpu
@card_only
@pytest.mark.parametrize("tokens", [17, 64, 200])
def test_forms_of_groups(tokens):
    if not is_hopper(draw(1).to(DEVICE)) or gluon_module("quantized_many") is None:
        pytest.skip("needs Gluon and Hopper")
    few, many = gluon_module("quantized_many"), gluon_module("quantized_codes_many")
    x = tokens_of(tokens, 3072)
    block_m = 32 if tokens == 17 else 64
    forms = [Groups(block_m, 3, 1), Groups(block_m, 2, 6, 3, 1, trigger=1), Groups(128, 3, 2, 4, 1),
             Groups(128, 2, 1, 4, 4, trigger=3), Groups(block_m, 2, 4, registers=136)]  # fmt: skip
    for offset, scale in ((None, torch.bfloat16), ("zero points", torch.float16)):
        record = to_device(grouped(768, 3072, bits=4, group=128, offset=offset))
        record = replace(record, scale=record.scale.to(scale))
        want, laid = record.product(x, in_fp64, None), lay_out_grouped(record)
        for form in forms:
            assert few.grouped_many_fits(form, x, laid, gated=False)
            y = few.grouped_many(form, x, laid)
            assert error(summed(y), want) < 4e-3
            assert torch.equal(y, few.grouped_many(form, x, laid))
            if form.split_k == 1:
                y = few.grouped_many(form, x, laid, gated=True)
                assert error(y, gated(want)) < 8e-3
    for make in BY_CODES.values():
        record = to_device(make(768, 3072))
        weight, want = made.quantized_weight(record), record.product(x, in_fp64, None)
        codes, scales = weight._quantized(x)
        tensors = codes, scales, weight.codes, weight.scale
        for form in forms:
            assert many.codes_many_fits(form, codes, weight.codes, gated=False)
            y = many.codes_many(form, *tensors, dtype=BF16)
            assert error(summed(y), want) < 4e-3
            assert torch.equal(y, many.codes_many(form, *tensors, dtype=BF16))
            if form.split_k == 1:
                y = many.codes_many(form, *tensors, dtype=BF16, gated=True)
                assert error(y, gated(want)) < 8e-3


@pytest.mark.gpu
@card_only
@pytest.mark.parametrize("tokens", [1, 16, 64, 100, 160, 224, 256, 1001])
def test_every_tuned_shape(tokens):
    shapes = {(rows, columns, is_gated) for _, _, _, rows, columns, is_gated in TUNED}
    for rows, columns, is_gated in sorted(shapes):
        x = tokens_of(tokens, columns)
        for name in ("4 bits, zero points", "fp8, tokens", "fp8, blocks", "int8"):
            record = to_device(RECORDS[name](rows, columns))
            weight, want = made.quantized_weight(record), record.product(x, in_fp64, None)
            y = weight.gated_linear(x) if is_gated else summed(weight.partials(x))
            assert error(y, gated(want) if is_gated else want) < 8e-3, (name, rows, columns)


def test_forms_by_rule():
    assert choose("4 bits", 2, 5120, 5120) == Ring(8, 4)
    assert choose("4 bits", 1, 5120, 5120) == Ring(8, 4)
    assert choose("4 bits", 1, 2560, 9728) == Ring(8, 4)
    assert choose("fp8 blocks", 30, 5120, 5120) == Ring(32, 4, 6)
    assert choose("int8", 50, 2 * 17408, 5120, gated=True) == Ring(64, 1)
    assert choose("8 bits", 100, 5120, 5120) == Tile(128, 128, 4, 3, 8)
    assert choose("4 bits", 1001, 5120, 5120) == Library()
    assert choose("fp8", 65, 5120, 5120) == Library()
    assert choose("4 bits", 100, 5120, 5120) == Tile(128, 128, 4, 3, 8)
    assert choose("fp8 blocks", 40, 7168, 5120) == Ring(64, 2, 4)
    assert choose("int8", 65, 5120, 5120) == Tile(128, 128, 1, 3, 8, swap=False)
    assert tile_for(Ring(8, 4), 3) == Tile(16, 64, 4, 4, 4)
    assert invariant_tile(1024, 4096).split_k == 8
    assert invariant_tile(24576, 4096).split_k == 1


@pytest.mark.parametrize(
    ("scale", "offset", "forms"),
    [
        (BF16, None, (Warps, Ring, Groups)),
        (torch.float16, None, (Ring, Ring, Tile)),
        (BF16, torch.int16, (Ring, Ring, Tile)),
    ],
)
def test_forms_that_never_ran_with_some_codes_are_not_chosen(monkeypatch, scale, offset, forms):
    monkeypatch.setattr(made, "grouped_fits", lambda *_, **__: True)
    zeros = None if offset is None else torch.zeros(32, 4096, dtype=offset)
    scales = torch.ones(32, 4096, dtype=scale)
    laid = LaidOut(torch.empty(0), scales, zeros, "4", 4096, 4096, 128)
    weight = made.TritonGrouped(laid)
    chosen = [weight._form(torch.empty(tokens, 4096, dtype=BF16)) for tokens in (1, 16, 100)]
    assert tuple(type(form) for form in chosen) == forms


def weight_only_types(half="*bf16", fp32_out=False):
    pointers = {"x": half, "codes": "*u8", "scale": "*bf16", "offset": "*i16", "bias": half,
                "out": "*fp32" if fp32_out else half}  # fmt: skip
    return pointers | dict.fromkeys(("M", "N", "STRIDE"), "i32")


def compile_weight_only(form, capability, *, kind="4", group=128, is_gated=False, offset="zeros"):
    compiled = compile_for(
        quantized_grouped.grouped_kernel, weight_only_types(fp32_out=form.split_k > 1),
        {"K": 4096, "CHUNKS": 32, "STEPS": 32 // form.split_k, "PARTS_EACH": 1, "GROUP": group,
         "GROUPS": 4096 // group, "KIND": kind, "OFFSET": offset, "BLOCK_M": form.block_m,
         "BLOCK_N": form.block_n, "BAND": form.band, "STAGES": form.stages, "GATED": is_gated,
         "BIAS": False, "ASM": True, "PDL": capability >= 90},
        capability, divisible=("x", "codes", "scale", "offset", "out", "N", "STRIDE"),
        num_warps=form.warps,
    )  # fmt: skip
    assert_fits(compiled, capability)
    return compiled


SMALL = tile_for(Ring(16, 4), 16)


@outer_only
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("form", [SMALL, invariant_tile(4096, 4096)])
def test_weight_only_compiles_ahead_of_time(form, capability):
    compiled = compile_weight_only(form, capability)
    if capability == 90:  # the dequantized tile stays in registers
        lines = [line for line in compiled.ptx.splitlines() if "wgmma.mma_async" in line]
        assert lines
        assert all("}, {" in line for line in lines)


@outer_only
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("form", {form for form in TUNED.values() if isinstance(form, Tile)
                                  and form.swap} | {Tile(128, 128, 1, 3, 8)})  # fmt: skip
def test_tuned_weight_only_compiles_ahead_of_time(form, is_gated):
    compile_weight_only(replace(form, split_k=1), 90, is_gated=is_gated, offset="none")


@outer_only
@pytest.mark.parametrize(
    ("kind", "group", "offset"), [("8", 32, "zeros"), ("4", 32, "floats"), ("e4m3", 128, "none")]
)
def test_other_codes_compile_ahead_of_time(kind, group, offset):
    for capability in (80, 90):
        compile_weight_only(SMALL, capability, kind=kind, group=group, offset=offset)
    compiled = compile_for(
        quantized_grouped.dequantize_kernel, weight_only_types(),
        {"K": 4096, "CHUNKS": 32, "GROUP": group, "GROUPS": 4096 // group, "KIND": kind,
         "OFFSET": offset, "BLOCK_N": 64, "ASM": True, "PDL": True},
        90, divisible=("codes", "scale", "offset", "out"), num_warps=4,
    )  # fmt: skip
    assert_fits(compiled, 90)


@outer_only
@pytest.mark.parametrize(
    ("code", "capability", "has_blocks"),
    [("*fp8e4nv", 90, False), ("*fp8e4nv", 90, True), ("*fp8e4nv", 100, False),
     ("*fp8e4nv", 100, True), ("*i8", 80, False), ("*i8", 90, False), ("*i8", 100, False)],
)  # fmt: skip
def test_products_of_codes_compile_ahead_of_time(code, capability, has_blocks):
    forms = [SMALL]
    if capability == 90:
        forms += [invariant_tile(4096, 4096), Tile(128, 128, 1, 3, 8, swap=False)]
    if capability == 90 and not has_blocks:
        forms += {form for key, form in TUNED.items() if isinstance(form, Tile)
                  and (key[0] == "int8") == (code == "*i8") and not form.swap}  # fmt: skip
    for form in forms:
        compiled = compile_for(
            quantized_codes.codes_kernel,
            {"x": code, "weight": code, "bias": "*bf16", "M": "i32", "N": "i32",
             "out": "*fp32" if form.split_k > 1 else "*bf16",
             "x_scale": "*fp32", "w_scale": "*fp32"},
            {"K": 4096, "COLUMNS": 4096 // form.split_k, "PARTS_EACH": 1,
             "BLOCK_M": form.block_m, "BLOCK_N": form.block_n, "BLOCK_K": 128, "BAND": 8,
             "STAGES": form.stages, "SWAP": form.swap, "GATED": False, "BIAS": False,
             "X_GROUPS": 32 if has_blocks else 1, "W_BLOCKS": has_blocks,
             "PREFETCH": False, "TRIGGER": 2 if capability >= 90 else 0},
            capability, divisible=("x", "weight", "x_scale", "w_scale", "out", "N"),
            num_warps=form.warps,
        )  # fmt: skip
        assert_fits(compiled, capability)
        if capability == 90:
            assert "wgmma.mma_async" in compiled.ptx


RINGS = {(key[0], replace(form, split_k=1), key[-1]): key for key, form in TUNED.items()
         if isinstance(form, Ring)}  # fmt: skip


@outer_only
@pytest.mark.parametrize("key", RINGS.values())
def test_rings_compile_ahead_of_time(key):
    pytest.importorskip("nv_kernels.linear.triton.slab")
    record, _, _, rows, columns, is_gated = key
    form = TUNED[key]
    share = columns // form.split_k
    kinds = [(torch.bfloat16, False), (torch.bfloat16, True)]
    if record != "4 bits":
        kinds = [(torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True), (torch.int8, False)]
    for dtype, other in kinds:
        compiled = compile_ring(form, dtype, rows, columns, is_gated, other)
        assert_fits(compiled, 90)
        before, after = compiled.ptx.split("griddepcontrol.wait", 1)
        assert "ld.global.v4" in before or "cp.async.bulk.tensor" in before
        assert "wgmma.mma_async" in after
        assert share % 128 == 0


def compile_ring(form, dtype, rows, columns, is_gated, other):
    """Compile a ring; other: with zero points, or with scales of blocks."""
    describe = gluon_module("slab").describe
    x = torch.empty(form.block_m, columns, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 \
        else torch.empty(form.block_m, columns, dtype=dtype)  # fmt: skip
    share = columns // form.split_k
    types = {"out": "*fp32" if form.split_k > 1 else "*bf16", "M": "i32", "N": "i32"}
    constants = {"K": columns, "COLUMNS": share, "BLOCK_M": form.block_m, "GATED": is_gated,
                 "STAGES": form.stages, "TRIGGER": form.trigger}  # fmt: skip
    if dtype == torch.bfloat16:
        module = gluon_module("quantized_slab")
        halves = x.view(-1, columns // 64, 64).transpose(0, 1)
        return compile_for(
            module.grouped_slab_kernel,
            types | {"x_desc": describe(halves, [2, form.block_m, 64]), "codes": "*i32",
                     "scale": "*bf16", "zeros": "*u16"},
            constants | {"GROUP": 128, "ZEROS": other, "DEPTH": module.depth(form.depth, share)},
            90, divisible=("codes", "scale", "zeros", "out", "N"), num_warps=4,
        )  # fmt: skip
    weight = torch.empty(2 if is_gated else 1, 128, columns, dtype=torch.uint8).view(dtype)
    halves = len(weight)
    return compile_for(
        gluon_module("quantized_codes_slab").codes_slab_kernel,
        types | {"x_desc": describe(x[None], [1, form.block_m, 128]),
                 "w_desc": describe(weight, [halves, form.rows // halves, 128]),
                 "x_scale": "*fp32", "w_scale": "*fp32"},
        constants | {"ROWS": form.rows, "X_GROUPS": columns // 128 if other else 1,
                     "W_BLOCKS": other},
        90, divisible=("x_scale", "w_scale", "out", "N"), num_warps=4,
    )  # fmt: skip


TUNED_WARPS = {(replace(form, trigger=2), key[3:]) for key, form in TUNED.items()
               if isinstance(form, Warps)}  # fmt: skip


@outer_only
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("form", "shape"), sorted(TUNED_WARPS, key=repr))
def test_forms_of_warps_compile_ahead_of_time(form, shape, has_zeros):
    rows, columns, is_gated = shape
    module = pytest.importorskip("nv_kernels.linear.triton.quantized_few")
    is_whole = form.split_k == 1
    compiled = compile_for(
        module.grouped_few_kernel,
        {"x": "*bf16", "codes": "*i32", "scale": "*bf16", "zeros": "*bf16", "residual": "*bf16",
         "norm_weight": "*bf16", "out": "*bf16" if is_whole else "*fp32", "total": "*bf16",
         "eps": "fp32", "N": "i32"},
        {"K": columns, "COLUMNS": columns // form.split_k, "GROUP": 128, "WARPS": form.warps,
         "GROUPS": form.groups, "UNITS": form.units, "CHUNKS": form.chunks, "DEPTH": form.depth,
         "PARTIALS": 0, "GATED": is_gated, "ZEROS": has_zeros,
         "NORM": is_whole and rows != 4096, "RESIDUAL": is_whole and rows == 4096,
         "TRIGGER": form.trigger},
        90, divisible=("x", "codes", "scale", "zeros", "residual", "norm_weight", "out", "N"),
        num_warps=form.warps, maxnreg=form.registers if has_zeros else None,
    )  # fmt: skip
    assert_fits(compiled, 90)
    before, after = compiled.ptx.split("griddepcontrol.wait", 1)
    assert "v4.b32" in before
    assert "mma.sync" in after


TUNED_GROUPS = {(key[0], replace(form, trigger=2), key[4], key[5]) for key, form in TUNED.items()
                if isinstance(form, Groups)}  # fmt: skip


@outer_only
@pytest.mark.parametrize(("record", "form", "columns", "is_gated"), sorted(TUNED_GROUPS, key=repr))
def test_forms_of_groups_compile_ahead_of_time(record, form, columns, is_gated):
    pytest.importorskip("nv_kernels.linear.triton.slab")
    describe = gluon_module("slab").describe
    dtype = {"4 bits": torch.bfloat16, "int8": torch.int8}.get(record, torch.float8_e4m3fn)
    x = torch.empty(form.block_m, columns, dtype=torch.int8 if dtype.itemsize == 1 else dtype)
    x = x.view(dtype)
    types = {"out": "*fp32" if form.split_k > 1 else "*bf16", "M": "i32", "N": "i32"}
    constants = {"K": columns, "COLUMNS": columns // form.split_k, "BLOCK_M": form.block_m,
                 "GROUPS": form.groups, "GATED": is_gated, "STAGES": form.stages,
                 "TRIGGER": form.trigger, "REGISTERS": form.group_registers}  # fmt: skip
    if record == "4 bits":
        module = gluon_module("quantized_many")
        halves = x.view(-1, columns // 64, 64).transpose(0, 1)
        compiled = compile_for(
            module.grouped_many_kernel,
            types | {"x_desc": describe(halves, [2, form.block_m, 64]), "codes": "*i32",
                     "scale": "*bf16", "zeros": "*u16"},
            constants | {"GROUP": 128, "ZEROS": False, "TURNS": form.turns,
                         "DEPTH": module.depth(form.depth, columns // form.split_k)},
            90, divisible=("codes", "scale", "zeros", "out", "N"), num_warps=4,
            maxnreg=form.registers,
        )  # fmt: skip
    else:
        halves = 2 if is_gated else 1
        weight = torch.empty(halves, 128, columns, dtype=torch.int8).view(dtype)
        has_blocks = record == "fp8 blocks"
        compiled = compile_for(
            gluon_module("quantized_codes_many").codes_many_kernel,
            types | {"x_desc": describe(x[None], [1, form.block_m, 128]),
                     "w_desc": describe(weight, [halves, 64 // halves, 128]),
                     "x_scale": "*fp32", "w_scale": "*fp32"},
            constants | {"X_GROUPS": columns // 128 if has_blocks else 1, "W_BLOCKS": has_blocks},
            90, divisible=("x_scale", "w_scale", "out", "N"), num_warps=4, maxnreg=form.registers,
        )  # fmt: skip
    assert_fits(compiled, 90)
    assert "wgmma.mma_async" in compiled.ptx


@outer_only
@pytest.mark.parametrize(("code", "inputs", "capability"), [
    ("*fp8e4nv", "token", 90), ("*fp8e4nv", "block", 90), ("*i8", "token", 80)
])  # fmt: skip
def test_quantizing_tokens_compiles_ahead_of_time(code, inputs, capability):
    for has_norm in (False, True):
        compiled = compile_for(
            triton_tokens.tokens_kernel,
            {"x": "*fp32" if has_norm else "*bf16", "residual": "*bf16", "weight": "*bf16",
             "codes": code, "scales": "*fp32", "total": "*bf16", "fixed": "fp32",
             "num_rows": "i32", "eps": "fp32"},
            {"E": 8192 if has_norm else 12288, "BLOCK_E": 8192 if has_norm else 16384,
             "PARTIALS": 8 if has_norm else 1,
             "HAS_RESIDUAL": has_norm, "NORM": has_norm, "INPUTS": inputs,
             "PDL": capability >= 90},
            capability, divisible=("x", "residual", "weight", "codes", "scales", "total"),
            num_warps=16 if has_norm else 32,
        )  # fmt: skip
        assert_fits(compiled, capability)
