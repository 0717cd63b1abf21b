"""Random matrices in every format, packed field by field, are read back: whole, and a rank's part.

The values that are expected come from the codes alone; nothing here unpacks.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from nv_models.quantization import gguf_scheme, read_scheme
from nv_models.quantization.form import Region

MODULE = "model.layers.0.mlp.down_proj"
CPU = torch.device("cpu")
AWQ_SHIFTS = [4 * field for field in (0, 4, 1, 5, 2, 6, 3, 7)]
SCALES_AT = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
GGUF_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


class Packed(NamedTuple):
    """A matrix in the files.

    Attributes:
        config: the quantization_config.
        tensors: by the ends of their names.
        values: [N, K] fp32.
        unit: rows and columns of which a rank's share is a multiple; None: it has all of them.
    """

    config: dict
    tensors: dict[str, torch.Tensor]
    values: torch.Tensor
    unit: tuple[int | None, int | None]


class Memory:
    """A checkpoint of one matrix."""

    def __init__(self, tensors):
        self.tensors = {f"{MODULE}.{end}": each.contiguous() for end, each in tensors.items()}
        self.shapes = {name: tuple(each.shape) for name, each in self.tensors.items()}

    def stored(self, name):
        return self.tensors[name].dtype


def read(form, files, region):
    """The record of a region, its tensors copied as the loader does."""
    shards = form.tensors(region, CPU)
    for shard in shards.values():
        source = files.tensors[shard.source]
        assert tuple(source.shape) == shard.shape
        if source.dim():
            size = shard.target.shape[shard.dim]
            source = source.narrow(shard.dim, shard.start, size)
        assert source.dtype == shard.target.dtype
        shard.target.copy_(source)
    record = form.record({name: shard.target for name, shard in shards.items()}, region)
    assert record.shape == region.kept
    planned = form.num_bytes(region)
    if getattr(form, "has_order", False) and record.order is None:  # shuffled into its own order
        planned -= 4 * len(region.columns)
    assert record.num_bytes == planned
    return record.dense(torch.float32)


def word(fields, shifts):
    """Codes in a word of 32 bits, as int32 has it."""
    return int(sum(int(code) << shift for code, shift in zip(fields, shifts, strict=True)))


def words(codes, shifts):
    """Each len(shifts) codes of a row in a word; a row's last word may lack some: [N, K] -> ."""
    lacking = -codes.shape[1] % len(shifts)
    codes = np.pad(codes, ((0, 0), (0, lacking)))
    packed = [[word(row[at : at + len(shifts)], shifts) for at in range(0, len(row), len(shifts))]
              for row in codes]  # fmt: skip
    return torch.from_numpy(np.array(packed, dtype=np.uint32).view(np.int32))


def shifts(bits):
    return list(range(0, 32, bits))


def spread(scale, groups):
    """A number per group [N, G] -> one per column [N, K]."""
    return scale[:, groups]


def product(codes, zeros, scale):
    """(q - z) s in fp32."""
    return torch.from_numpy((codes.astype(np.float32) - zeros.astype(np.float32)) * scale)


class Draw:
    """Random sizes and codes of a matrix in groups."""

    def __init__(self, data, bits, row_unit, group_unit):
        self.rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        self.bits, self.rows = bits, row_unit * data.draw(st.integers(1, 3))
        self.size = group_unit * data.draw(st.integers(1, 3))
        self.num_groups = data.draw(st.integers(1, 3))
        self.columns = self.size * self.num_groups
        self.groups = np.arange(self.columns) // self.size
        self.codes = self.rng.integers(0, 2**bits, (self.rows, self.columns))
        shape = self.rows, self.num_groups
        self.zeros = self.rng.integers(0, 2**bits, shape)
        self.scale = self.rng.uniform(1e-3, 1e-1, shape).astype(np.float16)

    def values(self, zeros):
        return product(
            self.codes,
            spread(zeros, self.groups),
            spread(self.scale, self.groups).astype(np.float32),
        )


def awq(data):
    drawn = Draw(data, 4, 8, 4)
    config = {"quant_method": "awq", "version": "gemm", "bits": 4, "zero_point": True}
    tensors = {
        "qweight": words(drawn.codes.T, AWQ_SHIFTS),
        "qzeros": words(drawn.zeros.T, AWQ_SHIFTS),
        "scales": torch.from_numpy(drawn.scale.T.copy()),
    }
    unit = 8, drawn.size
    return Packed(config | {"group_size": drawn.size}, tensors, drawn.values(drawn.zeros), unit)


def gptq(data):
    bits = data.draw(st.sampled_from([4, 8]))
    drawn = Draw(data, bits, 32 // bits, 32 // bits)
    is_v1, is_symmetric, has_order = (data.draw(st.booleans()) for _ in range(3))
    zeros = np.full_like(drawn.zeros, 2 ** (bits - 1)) if is_symmetric else drawn.zeros
    if has_order:
        drawn.rng.shuffle(drawn.groups)
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": drawn.size, "sym": is_symmetric,
        "desc_act": has_order, "checkpoint_format": "gptq" if is_v1 else "gptq_v2",
    }  # fmt: skip
    stored = (zeros - is_v1) % 2**bits
    tensors = {
        "qweight": words(drawn.codes, shifts(bits)).T,
        "qzeros": words(stored.T, shifts(bits)),
        "scales": torch.from_numpy(drawn.scale.T.copy()),
        "g_idx": torch.from_numpy(drawn.groups).int(),
    }
    columns = None if has_order else drawn.size
    return Packed(config, tensors, drawn.values(zeros), (32 // bits, columns))


def compressed(format_, weights, inputs=None):
    group = {"targets": ["Linear"], "format": format_, "weights": {"symmetric": True, **weights}}
    if inputs:
        group["input_activations"] = {"symmetric": True, "dynamic": True, **inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def packed_integers(data):
    bits = data.draw(st.sampled_from([4, 8]))
    is_symmetric, has_groups = data.draw(st.booleans()), data.draw(st.booleans())
    has_order = has_groups and data.draw(st.booleans())
    per_word = 32 // bits
    # whole words where a rank may have a share; a row of one group may end inside a word
    drawn = Draw(data, bits, 1, per_word if has_groups else 2)
    if not has_groups:
        drawn.num_groups, drawn.size, drawn.groups = 1, drawn.columns, drawn.groups * 0
        drawn.zeros, drawn.scale = drawn.zeros[:, :1], drawn.scale[:, :1]
    middle = np.full_like(drawn.zeros, 2 ** (bits - 1))
    zeros = middle if is_symmetric else drawn.zeros
    if has_order:
        drawn.rng.shuffle(drawn.groups)
    weights = {
        "num_bits": bits, "type": "int", "symmetric": is_symmetric,
        "strategy": "group" if has_groups else "channel",
        "group_size": drawn.size if has_groups else None,
        "actorder": "group" if has_order else None,
    }  # fmt: skip
    tensors = {
        "weight_packed": words(drawn.codes, shifts(bits)),
        "weight_scale": torch.from_numpy(drawn.scale),
        "weight_shape": torch.tensor(drawn.codes.shape),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = words(zeros.T, shifts(bits)).T
    if has_order:
        tensors["weight_g_idx"] = torch.from_numpy(drawn.groups).int()
    rows = 1 if is_symmetric else per_word
    columns = drawn.size if has_groups and not has_order else None
    unit = rows, columns
    return Packed(compressed("pack-quantized", weights), tensors, drawn.values(zeros), unit)


def codes_of_8_bits(data):
    shape = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator), generator


def int8(data):
    codes, generator = codes_of_8_bits(data)
    codes = codes.view(torch.int8)
    scale = torch.rand(len(codes), 1, generator=generator)
    shape = data.draw(st.sampled_from([(len(codes), 1), (len(codes),)]))
    config = compressed(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        {"num_bits": 8, "type": "int", "strategy": "token"},
    )
    tensors = {"weight": codes, "weight_scale": scale.view(shape)}
    return Packed(config, tensors, codes.float() * scale, (1, 1))


def fp8(data):
    codes, generator = codes_of_8_bits(data)
    codes[codes & 127 == 127] = 0  # not a number
    codes = codes.view(torch.float8_e4m3fn)
    rows, columns = codes.shape
    by = data.draw(st.sampled_from(["row", "tensor", "block"]))
    is_compressed = by == "row" or data.draw(st.booleans())
    size = {"row": (rows, 1), "tensor": (1, 1), "block": (-(-rows // 128), -(-columns // 128))}[by]
    scale = torch.rand(size, generator=generator)
    wide = scale
    if by == "block":
        wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    stored = scale.view(1) if by == "tensor" else scale
    if is_compressed:
        weights = {"num_bits": 8, "type": "float", "block_structure": [128, 128],
                   "strategy": {"row": "channel"}.get(by, by)}  # fmt: skip
        inputs = {"num_bits": 8, "type": "float", "strategy": "token"}
        config, end = compressed("float-quantized", weights, inputs), "weight_scale"
    elif by == "tensor":
        config, end, stored = {"quant_method": "fp8"}, "weight_scale", scale.view(())
    else:
        config, end = {"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_scale_inv"
    unit = (128, 128) if by == "block" else (1, 1)
    return Packed(config, {"weight": codes, end: stored}, codes.float() * wide, unit)


FORMATS = {each.__name__: each for each in (awq, gptq, packed_integers, int8, fp8)}


def shares(total, unit):
    """The parts of a dimension that a rank of several may have."""
    if unit is None or total // unit < 2:
        return st.just(range(total))
    bounds = st.integers(0, total // unit).map(lambda count: count * unit)
    pairs = st.tuples(bounds, bounds).filter(lambda pair: pair[0] < pair[1])
    return pairs.map(lambda pair: range(*pair))


def a_region(data, shape, unit):
    """The whole matrix, or some of its rows, or of its columns."""
    rows, columns = map(range, shape)
    part = data.draw(st.sampled_from(["whole", "rows", "columns"]))
    if part == "rows":
        rows = data.draw(shares(shape[0], unit[0]))
    if part == "columns":
        columns = data.draw(shares(shape[1], unit[1]))
    return Region(MODULE, shape, rows, columns)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_packed_is_read_back(name, data):
    packed = FORMATS[name](data)
    files = Memory(packed.tensors)
    scheme = read_scheme({"quantization_config": packed.config}, None, files, name="config.json")
    region = a_region(data, tuple(packed.values.shape), packed.unit)
    found = read(scheme.form(region), files, region)
    rows, columns = region.rows, region.columns
    wanted = packed.values[rows.start : rows.stop, columns.start : columns.stop]
    assert torch.equal(found, wanted)


class Blocks(Memory):
    """A GGUF file of one matrix, its rows perhaps in another order."""

    def __init__(self, kind, data, order):
        super().__init__({"weight": torch.from_numpy(data)})
        self.kind, self.data, self.order = kind, data, order

    def block_kind(self, name):
        return self.kind if name in self.shapes else None

    def blocks(self, _, rows, columns):
        values, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]]
        first, last = (bound // values * size for bound in (columns.start, columns.stop))
        return torch.from_numpy(self.data[rows.start : rows.stop, first:last])

    def row_index(self, _, rows):
        if self.order is None:
            return None
        return torch.from_numpy(self.order[rows.start : rows.stop] - rows.start)


@pytest.mark.parametrize("kind", GGUF_KINDS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_blocks_of_a_gguf_file_are_read_back(kind, data):
    number = GGMLQuantizationType[kind]
    per_block, size = GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows, count = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    blocks = rng.integers(0, 256, (rows, count, size), dtype=np.uint8)
    for at in SCALES_AT.get(kind, (0,)):
        scales = rng.uniform(1e-4, 1e-1, (rows, count, 1)).astype("<f2")
        blocks[:, :, at : at + 2] = scales.view(np.uint8)
    is_shuffled = data.draw(st.booleans())
    order = rng.permutation(rows) if is_shuffled else None
    files = Blocks(kind, blocks.reshape(rows, -1), order)
    values = torch.from_numpy(dequantize(files.data, number))
    values = values if order is None else values[torch.from_numpy(order)]
    # rows that change places are those of one head, of which a rank has all
    shape = rows, count * per_block
    region = a_region(data, shape, (None if is_shuffled else 1, per_block))
    form = gguf_scheme(files, CPU, torch.float32, None).form(region)
    shards = form.tensors(region, CPU)
    record = form.record({name: shard.target for name, shard in shards.items()}, region)
    assert record.num_bytes == form.num_bytes(region)
    kept, columns = region.rows, region.columns
    wanted = values[kept.start : kept.stop, columns.start : columns.stop]
    assert torch.equal(record.dense(torch.float32), wanted)
