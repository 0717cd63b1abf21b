"""Quantized records: their values bit for bit, rows, stacks, bytes, and products by definition."""

import numpy as np
import nv_kernels as nk
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from nv_kernels.linear.quantized.block_kinds import BLOCK_KINDS
from quantized_cases import RECORDS, blocks, draw, fp8, grouped, int8, random_bytes

SHAPE = (130, 256)
quick = settings(max_examples=20, deadline=None)


@pytest.fixture(scope="module")
def records():
    return {name: make(*SHAPE) for name, make in RECORDS.items()}


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks_are_the_gguf_library_s_bit_for_bit(kind):
    record = blocks(kind, 7, 512, seed=3)
    want = dequantize(record.parts[0].numpy(), GGMLQuantizationType[kind])
    assert record.shape == want.shape == (7, 512)
    assert torch.equal(record.dense(torch.float32), torch.from_numpy(want))
    assert torch.equal(record.dense(torch.bfloat16), torch.from_numpy(want).bfloat16())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_gguf_library_packs_is_read_back(kind):
    values = draw(5, 96).numpy()
    packed = quantize(values, GGMLQuantizationType[kind])
    record = nk.Blocks((torch.from_numpy(packed),), kind)
    got = record.dense(torch.float32).numpy()
    assert np.array_equal(got, dequantize(packed, GGMLQuantizationType[kind]))
    assert np.abs(got - values).max() < np.abs(values).max() / (7 if kind < "Q5" else 15)


@quick
@given(
    bits=st.sampled_from([4, 8]),
    groups=st.integers(1, 4),
    pairs=st.integers(1, 20),
    rows=st.integers(1, 5),
    offset=st.sampled_from([None, "zero points", "floats"]),
    scale_type=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_packed_codes_are_read_back(bits, groups, pairs, rows, offset, scale_type, seed):
    columns = groups * pairs * 2
    q = random_bytes(rows, columns, seed=seed).numpy() >> (8 - bits)
    codes = q if bits == 8 else q[:, ::2] | q[:, 1::2] << 4
    scale = draw(rows, groups, seed=seed).to(scale_type)
    wide = scale.float().numpy().repeat(pairs * 2, 1)
    offsets, want = None, wide * (q.astype(np.float32) - 2 ** (bits - 1))
    if offset == "zero points":
        offsets = random_bytes(rows, groups, seed=seed + 1) >> (8 - bits)
        zeros = offsets.numpy().repeat(pairs * 2, 1).astype(np.float32)
        want = wide * (q.astype(np.float32) - zeros)
    elif offset == "floats":
        offsets = draw(rows, groups, seed=seed + 1).to(scale_type)
        want = wide * q.astype(np.float32) + offsets.float().numpy().repeat(pairs * 2, 1)
    record = nk.Grouped(torch.from_numpy(codes), scale, offsets, bits)
    assert record.shape == (rows, columns)
    assert np.array_equal(record.dense(torch.float32).numpy(), want)
    assert record.group_size == pairs * 2


def test_eight_codes_in_an_int32_are_the_packing_of_compressed_tensors():
    q = torch.arange(16).view(1, 16)
    words = (q.view(1, 2, 8) << torch.arange(0, 32, 4)).sum(-1)  # lowest bits first along K
    codes = words.to(torch.uint32).view(torch.uint8)
    record = nk.Grouped(codes, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.uint8), 4)
    assert torch.equal(record.dense(torch.float32), q.float())


def test_an_order_puts_columns_where_x_has_them():
    plain = grouped(6, 64, bits=4, group=32)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    record = nk.Grouped(plain.codes, plain.scale, None, 4, order.int())
    x = draw(3, 64)
    torch.testing.assert_close(record.linear(x), plain.linear(x[:, order]))
    assert torch.equal(record.dense(torch.float32)[:, order], plain.dense(torch.float32))


@pytest.mark.parametrize("name", RECORDS)
def test_rows_and_stacks_have_the_rows_of_dense(name, records):
    record = records[name]
    whole = record.dense(torch.float32)
    index = torch.randperm(130, generator=torch.Generator().manual_seed(0))
    if name.startswith("fp8, blocks"):  # 128 rows share their scales
        index = torch.cat([torch.randperm(128), torch.tensor([129, 128])])
    some = record.rows(index)
    assert type(some) is type(record)
    assert torch.equal(some.dense(torch.float32), whole[index])
    assert torch.equal(some.rows(torch.arange(20)).dense(torch.float32), whole[index[:20]])
    top = record.rows(torch.arange(128))
    stack = type(record).stack([top, top, some])
    assert stack.shape == (386, 256)
    want = torch.cat([whole[:128], whole[:128], whole[index]])
    assert torch.equal(stack.dense(torch.float32), want)


def test_num_bytes_are_those_of_all_tensors(records):
    rows, columns = SHAPE
    values = rows * columns
    bits = {"Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5, "Q4_K": 4.5,
            "Q5_K": 5.5, "Q6_K": 6.5625, "4 bits": 4.5, "4 bits, zero points": 4.1875,
            "8 bits": 8.5}  # fmt: skip
    for name, wanted in bits.items():
        assert records[name].num_bytes * 8 == wanted * values, name
    assert records["fp8, tokens"].num_bytes == records["int8"].num_bytes == values + 4 * rows
    assert records["fp8, blocks"].num_bytes == values + 4 * 4
    blocks = records["Q4_0"]
    assert blocks.rows(torch.arange(5)).num_bytes == blocks.num_bytes + 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECORDS)
def test_the_product_is_that_of_dense(name, dtype, records):
    record = records[name]
    x, bias = draw(5, 256, seed=9).to(dtype), draw(130, seed=8).to(dtype)
    got = record.linear(x, bias)
    assert got.dtype == dtype
    values = x.double()
    if isinstance(record, nk.Int8):
        codes, scale = nk.quantize_tokens_int8(x)
        values = codes.double() * scale
    elif isinstance(record, nk.Fp8) and record.inputs is not None:
        codes, scale = nk.quantize_tokens_fp8(x, record.inputs)
        values = codes.double() * (scale.repeat_interleave(256 // scale.shape[1], 1))
    want = values @ record.dense(torch.float32).double().T
    error = (got.double() - want - bias.double()).norm() / want.norm()
    assert error < (1e-6 if dtype == torch.float32 else 5e-3)
    scores = record.logits(x)
    assert scores.dtype == torch.float32
    assert (scores.double() - want).norm() / want.norm() < (
        1e-6 if dtype == torch.float32 else 5e-3
    )


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks_as_grouped(kind):
    record = blocks(kind, 6, 512, seed=5)
    as_grouped, whole = record.grouped(), record.dense(torch.float32)
    assert as_grouped.scale.dtype == torch.float16
    assert as_grouped.bits == (4 if kind.startswith("Q4") else 8)
    got = as_grouped.dense(torch.float32)
    if kind.endswith("_K"):  # two factors, rounded to fp16 once multiplied
        error = (got - whole).abs()
        q, scale, offset = BLOCK_KINDS[kind].unpack(
            record.parts[0].view(-1, BLOCK_KINDS[kind].num_bytes)
        )
        largest = scale.abs().amax() * q.amax() + (0 if offset is None else offset.abs().amax())
        assert error.max() <= largest * 2**-11
        assert (error / whole.abs().amax()).max() > 0
    else:
        assert torch.equal(got, whole)
    picked = record.rows(torch.tensor([4, 0])).grouped()
    assert torch.equal(picked.dense(torch.float32), got[[4, 0]])


def test_a_stack_of_different_kinds_of_blocks():
    kinds = ("Q4_K", "Q6_K", "Q4_1", "Q8_0")
    records = [blocks(kind, 3, 256, seed=seed) for seed, kind in enumerate(kinds)]
    index = torch.tensor([2, 0])
    mixed = nk.Blocks.stack([records[0].rows(index), *records[1:]])
    values = [record.dense(torch.float32) for record in records]
    want = torch.cat([values[0][index], *values[1:]])
    assert mixed.shape == (11, 256)
    assert torch.equal(mixed.dense(torch.float32), want)
    assert mixed.num_bytes == sum(record.num_bytes for record in records) + 88  # and the index
    apart = [record.grouped().dense(torch.float32) for record in records]
    together = mixed.grouped()
    assert (together.bits, together.group_size) == (8, 16)
    expected = torch.cat([apart[0][index], *apart[1:]])
    torch.testing.assert_close(together.dense(torch.float32), expected, rtol=1e-6, atol=1e-7)


def test_scales_too_large_for_fp16_stay_fp32():
    record = blocks("Q4_K", 2, 256)
    d = record.parts[0].view(2, 144)[:, :2]
    d[:] = torch.tensor([3, 0], dtype=torch.uint8)  # 3 * 2^-24, whose products are exact in fp16
    assert record.grouped().scale.dtype == torch.float16
    d[:] = torch.tensor([0, 0x78], dtype=torch.uint8)  # 2^15
    assert record.grouped().scale.dtype == torch.float32
    assert torch.equal(record.grouped().dense(torch.float32), record.dense(torch.float32))


def test_columns_of_a_wider_matrix_need_no_copy():
    wide = blocks("Q4_1", 4, 512)
    half = nk.Blocks((wide.parts[0][:, 160:],), "Q4_1")
    assert torch.equal(half.dense(torch.float32), wide.dense(torch.float32)[:, 256:])


def test_tokens_in_e4m3():
    x = torch.tensor([[448.0, 1.0, -3.3, 0.0], [0.0, 0.0, 0.0, 0.0], [-2.0, 1.9, 1e-9, 0.5]])
    codes, scale = nk.quantize_tokens_fp8(x)
    assert scale.flatten().tolist() == [1.0, 1.0, np.float32(2.0) / np.float32(448.0)]
    assert codes[0].tolist() == [448.0, 1.0, -3.25, 0.0]
    assert codes[1].tolist() == [0.0] * 4
    assert codes[2, 0] == -448
    codes, scale = nk.quantize_tokens_fp8(x, 0.5)  # a static scale: larger values are clamped
    assert codes[0].tolist() == [448.0, 2.0, -6.5, 0.0]
    x = draw(3, 300)
    codes, scale = nk.quantize_tokens_fp8(x, "block")
    assert scale.shape == (3, 3)
    assert torch.equal(scale[:, 2], x[:, 256:].abs().amax(1) / 448)
    first, first_scale = nk.quantize_tokens_fp8(x[:, :128])
    assert torch.equal(codes[:, :128].float(), first.float())
    assert torch.equal(scale[:, :1], first_scale)


def test_tokens_in_8_bits():
    codes, scale = nk.quantize_tokens_int8(torch.tensor([[-51.0, 0.2, 0.6, 51.0], [0.0] * 4]))
    assert scale.tolist() == [[np.float32(51 / 127.5)], [1.0]]
    assert codes.tolist() == [[-128, 0, 2, 127], [0] * 4]  # ties to even, then clamped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats_as_fp8(dtype):
    values = draw(6, 40).to(dtype)
    values[3] = 0
    record = nk.quantize_fp8(values)
    assert record.inputs == "token"
    assert record.scale[3] == 1
    error = (record.dense(torch.float32) - values.float()).abs()
    assert (error <= values.float().abs() * 2**-4 + record.scale[:, None] * 2**-10).all()
    assert torch.equal(record.codes.float().abs().amax(1)[:3], torch.full((3,), 448.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("make", [nk.reference, nk], ids=["definition", "device"])
def test_a_token_alone_is_bitwise_itself_in_a_batch(make, name, dtype, records):
    weight = make.batch_invariant_quantized_weight(records[name])
    x = draw(33, 256, seed=4).to(dtype)
    norm = torch.nn.RMSNorm(256, 1e-6, dtype=dtype).requires_grad_(requires_grad=False)
    whole = weight.linear(x)
    gated, _ = weight.norm_gated_linear(nk.Stream(x), norm)
    scores = weight.logits(x)
    for rows in (slice(0, 1), slice(7, 10), slice(32, 33), slice(0, 17)):
        assert torch.equal(weight.linear(x[rows]), whole[rows])
        assert torch.equal(weight.norm_gated_linear(nk.Stream(x[rows]), norm)[0], gated[rows])
        assert torch.equal(weight.logits(x[rows]), scores[rows])


def test_what_does_not_fit_is_refused_by_name():
    four, eight = grouped(4, 64, bits=4, group=32), grouped(4, 64, bits=8, group=32)
    ordered = nk.Grouped(four.codes, four.scale, None, 4, torch.arange(64).int())
    rows, static = fp8(4, 64, by="row", inputs="token"), fp8(4, 64, by="row", inputs=0.5)
    by_block = fp8(130, 128, by="block", inputs="block")
    ones = torch.ones(4, 2)
    for make, message in {
        lambda: nk.Grouped.stack([four, eight]): r"bits is \[4, 8\]",
        lambda: nk.Grouped.stack(
            [four, grouped(4, 64, bits=4, group=64)]
        ): r"group_size is \[32, 6",
        lambda: nk.Grouped.stack(
            [four, grouped(4, 128, bits=4, group=32)]
        ): r"columns are \[64, 128",
        lambda: nk.Grouped.stack([four, ordered]): "order differs",
        lambda: nk.Grouped.stack([four, nk.Grouped(four.codes, ones, None, 4)]): "dtypes are",
        lambda: nk.Grouped(four.codes, ones, None, 5): "bits is 5: it must be 4 or 8",
        lambda: nk.Grouped(four.codes, torch.ones(4, 3), None, 4): r"scale has shape \(4, 3\)",
        lambda: nk.Grouped(four.codes, ones, ones[:, :1], 4): r"offset has shape \(4, 1\)",
        lambda: nk.Fp8.stack([rows, static]): r"inputs is \['token', 0.5\]",
        lambda: nk.Fp8.stack([by_block, by_block]): "a matrix has 130 rows: with scales of blocks",
        lambda: by_block.rows(torch.tensor([0, 129])): "rows of one block are taken apart",
        lambda: nk.Fp8(rows.codes, ones, None): r"scale has shape \(4, 2\): for codes \(4, 64\)",
        lambda: nk.Fp8(rows.codes, ones[:, 0], "tensor"): "inputs is 'tensor'",
        lambda: nk.Int8.stack([int8(4, 64), int8(4, 32)]): r"columns are \[64, 32\]",
        lambda: nk.Int8(int8(4, 64).codes, ones): r"scale has shape \(4, 2\)",
        lambda: nk.Blocks.stack([blocks("Q4_0", 2, 64), blocks("Q8_0", 2, 96)]): "columns are",
        lambda: nk.Blocks((four.codes,), "Q4_0"): r"rows are torch.uint8 \(4, 32\): Q4_0 needs",
        lambda: nk.Blocks((four.codes,), ("Q4_0", "Q8_0")): "for 1 parts: each has one",
        lambda: nk.Blocks((four.codes,), "IQ2_S"): "kind is 'IQ2_S': it must be one of Q4_0, Q4_1",
    }.items():
        with pytest.raises(ValueError, match=message):
            make()


def test_a_stack_takes_the_largest_scale_of_x():
    parts = [fp8(4, 64, by="row", inputs=scale) for scale in (0.5, 0.75, 0.25)]
    assert nk.Fp8.stack(parts).inputs == 0.75
