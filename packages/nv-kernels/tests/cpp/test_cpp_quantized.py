"""The CPU's products by quantized weights against their definitions."""

import nv_kernels as nk
import pytest
import torch
from nv_kernels.cpp.library import find_compiler
from nv_kernels.cpp.quantized_weight import CppQuantized
from quantized_cases import RECORDS, blocks, draw, fp8, grouped, int8

pytestmark = pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
DTYPES = [torch.float32, torch.bfloat16]
ODD = {
    "one column of groups": lambda: grouped(33, 100, bits=4, group=100, offset="zero points"),
    "groups of 12": lambda: grouped(7, 36, bits=4, group=12, offset="floats"),
    "groups of 3": lambda: grouped(1, 9 * 2, bits=4, group=3),
    "groups of 33": lambda: grouped(5, 66, bits=4, group=33, offset="zero points"),
    "groups of 16": lambda: grouped(49, 96, bits=8, group=16, offset="zero points"),
    "8 bits, one column": lambda: grouped(5, 77, bits=8, group=77),
    "fp8, edge blocks": lambda: fp8(130, 300, by="block", inputs="block"),
    "fp8, blocks by token": lambda: fp8(130, 260, by="block", inputs="token"),
    "fp8, rows by block": lambda: fp8(33, 300, by="row", inputs="block"),
    "fp8, odd": lambda: fp8(19, 71, by="row", inputs=0.02),
    "int8, odd": lambda: int8(97, 35),
    "int8, many columns": lambda: int8(17, 2080),
}


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def check(record, num_tokens, dtype):
    weight = nk.quantized_weight(record)
    assert isinstance(weight, CppQuantized)
    rows, columns = record.shape
    x, bias = draw(num_tokens, columns, seed=1).to(dtype), draw(rows, seed=2).to(dtype)
    bound = 2e-6 if dtype == torch.float32 else 5e-3
    got = weight.linear(x, bias)
    assert got.dtype == dtype
    assert error(got, record.linear(x.float(), bias.float())) < bound
    scores = weight.logits(x)
    assert scores.dtype == torch.float32
    assert error(scores, record.logits(x)) < bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 30, 130])
@pytest.mark.parametrize("name", RECORDS)
def test_products_are_their_definition_s(name, num_tokens, dtype):
    check(RECORDS[name](70, 256), num_tokens, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [2, 40])
@pytest.mark.parametrize("name", ODD)
def test_odd_sizes(name, num_tokens, dtype):
    check(ODD[name](), num_tokens, dtype)


@pytest.mark.parametrize("name", ["Q4_1", "4 bits, one group", "fp8, tokens", "int8"])
def test_4096_tokens(name):
    check(RECORDS[name](40, 256), 4096, torch.bfloat16)


def test_no_tokens():
    weight = nk.quantized_weight(blocks("Q4_0", 8, 64))
    assert weight.linear(torch.empty(0, 64)).shape == (0, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "4 bits, floats", "fp8, tokens", "int8"])
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_norm_and_product_in_one_call_are_those_op_by_op(num_tokens, name, dtype):
    weight = nk.quantized_weight(RECORDS[name](96, 256))
    norm = torch.nn.RMSNorm(256, 1e-6, dtype=dtype).requires_grad_(requires_grad=False)
    norm.weight.copy_(draw(256, seed=5))
    stream = nk.Stream(draw(num_tokens, 256).to(dtype), draw(num_tokens, 256, seed=1).to(dtype))
    bias = draw(96, seed=6).to(dtype)
    normed, whole = nk.normalise(stream, norm)
    out, after = weight.norm_linear(stream, norm, bias)
    assert torch.equal(after.hidden, whole.hidden)
    assert torch.equal(out, weight.linear(normed, bias))
    gated, after = weight.norm_gated_linear(stream, norm, bias)
    assert torch.equal(after.hidden, whole.hidden)
    assert torch.equal(gated, nk.silu_and_mul(weight.linear(normed, bias)))


def test_parts_rows_and_columns_of_blocks_are_used_where_they_lie():
    first, second = blocks("Q4_1", 6, 512), blocks("Q4_1", 10, 512, seed=7)
    index = torch.tensor([3, 0, 5])
    record = nk.Blocks.stack([first.rows(index), second])
    x = draw(2, 512)
    weight = nk.quantized_weight(record)
    assert error(weight.linear(x), record.linear(x)) < 2e-6
    first.parts[0].zero_()  # the weight reads these bytes, not a copy
    assert weight.linear(x)[:, :3].count_nonzero() == 0
    right = nk.Blocks((second.parts[0][:, 160:],), "Q4_1")
    got = nk.quantized_weight(right).linear(x[:, 256:])
    assert error(got, x[:, 256:] @ second.dense(torch.float32)[:, 256:].T) < 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [2, 20])
def test_blocks_of_several_kinds_are_one_matrix(num_tokens, dtype):
    kinds = ("Q4_K", "Q6_K", "Q5_1")
    check(nk.Blocks.stack([blocks(kind, 21, 256) for kind in kinds]), num_tokens, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_order_of_columns(dtype):
    plain = grouped(12, 64, bits=4, group=32)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).int()
    record = nk.Grouped(plain.codes, plain.scale, None, 4, order)
    check(record, 3, dtype)
    norm = torch.nn.RMSNorm(64, 1e-6).requires_grad_(requires_grad=False)
    x = draw(3, 64)
    out, _ = nk.quantized_weight(record).norm_linear(nk.Stream(x), norm)
    assert error(out, record.norm_linear(nk.Stream(x), norm)[0]) < 2e-6


@pytest.mark.parametrize("scale_type", [torch.float16, torch.bfloat16, torch.float32])
def test_types_of_scales(scale_type):
    plain = grouped(9, 64, bits=4, group=32)
    for offset in (None, draw(9, 2).to(scale_type)):
        check(nk.Grouped(plain.codes, plain.scale.to(scale_type), offset, 4), 2, torch.float32)


def test_other_dtypes_run_the_definition():
    record = blocks("Q8_0", 8, 64)
    x = draw(2, 64).half()
    weight = nk.quantized_weight(record)
    assert torch.equal(weight.linear(x), record.linear(x))
    assert torch.equal(weight.logits(x), record.logits(x))


def test_values_past_e4m3_are_its_largest():
    record = fp8(8, 64, by="row", inputs=0.001)
    x = draw(2, 64)
    assert nk.quantize_tokens_fp8(x, 0.001)[0].float().abs().eq(448).sum() > 40
    assert error(nk.quantized_weight(record).linear(x), record.linear(x)) < 2e-6


def test_every_step_and_tie_of_e4m3():
    wide = torch.cat([2.0 ** torch.arange(-12, 9) * (1 + step / 16) for step in range(16)])
    tiny = torch.arange(0, 40) * 2.0**-10  # multiples of half the smallest e4m3
    values = torch.cat([wide, tiny]).clamp(max=448)[:, None]
    one = nk.Fp8(torch.ones(1, 1).to(torch.float8_e4m3fn), torch.ones(1), 1.0)
    signs = torch.cat([values, -values])
    assert torch.equal(nk.quantized_weight(one).linear(signs), one.linear(signs))


def test_ties_of_8_bits():
    halves = torch.arange(-255, 256)[None] / 2.0  # the largest is 127.5: the scale is 1
    eye = nk.Int8(torch.eye(511).to(torch.int8), torch.ones(511))
    got = nk.quantized_weight(eye).linear(halves)
    assert torch.equal(got, halves.round().clamp(-128, 127))
