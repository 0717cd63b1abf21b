"""The instructions that unpack codes of 4 bits on a card, run one by one in torch on a CPU."""

import re

import pytest
import torch
from nv_kernels.linear.triton.product import gluon_module

BF16 = torch.bfloat16
WORDS = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(1))


def halves(word):
    """Two bf16 from a 32-bit word, the low one first."""
    parts = torch.stack((word & 0xFFFF, (word >> 16) & 0xFFFF))
    return parts.to(torch.int32).to(torch.int16).view(BF16).double()


def joined(pair):
    """A 32-bit word from two numbers, each rounded once to bf16."""
    bits = pair.to(BF16).view(torch.int16).long() & 0xFFFF
    return bits[0] | bits[1] << 16


def prmt(word, zero, selectors):
    sources = [(word >> 8 * n) & 0xFF for n in range(4)] + [
        (zero >> 8 * n) & 0xFF for n in range(4)
    ]
    return sum(sources[(selectors >> 4 * n) & 7] << 8 * n for n in range(4))


def lop3(a, b, c, table):
    assert table == 0xEA
    return (a & b) | c


DO = {
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "shr.u32": lambda a, by: (a & 0xFFFFFFFF) >> by,
    "sub.rn.bf16x2": lambda a, b: joined(halves(a) - halves(b)),
    "mul.rn.bf16x2": lambda a, b: joined(halves(a) * halves(b)),
    "fma.rn.bf16x2": lambda a, b, c: joined(halves(a) * halves(b) + halves(c)),
}


def run(text, inputs):
    """Run the instructions; inputs by number. Returns the four results."""
    registers = {f"${number}": value for number, value in inputs.items()}
    for line in text.strip().strip("{}").split(";"):
        found = re.match(r"\s*(\S+)\s+(.+)", line.strip(), re.DOTALL)
        if not found or found[1] == ".reg":
            continue
        into, *given = (part.strip() for part in found[2].split(","))
        values = [registers[x] if x in registers else torch.tensor(int(x, 0)) for x in given]
        constants = [int(v) if v.dim() == 0 else v for v in values]
        registers[into] = DO[found[1]](*constants)
    return [halves(registers[f"${number}"].expand(WORDS.shape)) for number in range(4)]


def codes():
    """Codes of two columns each: rows r and r + 8 of the low half, then of the high half."""
    nibble = [[(WORDS >> 8 * byte + 4 * high) & 15 for byte in range(4)] for high in range(2)]
    return [torch.stack(nibble[high][2 * row : 2 * row + 2]).double()
            for high in range(2) for row in range(2)]  # fmt: skip


def twice(value):
    return joined(torch.full((2, 1), value, dtype=torch.float64))


@pytest.mark.parametrize("zeros", [(8.0, 8.0), (0.0, 15.0), (11.0, 3.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_become_the_values_of_the_definition(dtype, zeros):
    module = gluon_module("quantized_many")
    if module is None:
        pytest.skip("needs Gluon")
    for scales in ((0.0123, 0.4), (0.00071, 1.7)):
        exact = [float(torch.tensor(s).to(dtype)) for s in scales]
        main = [float(torch.tensor(s).to(BF16)) for s in exact]
        inputs = {4: WORDS, 5: twice(128 + zeros[0]), 6: twice(128 + zeros[1]),
                  7: twice(main[0]), 8: twice(main[1])}  # fmt: skip
        text = module.UNPACK.value
        if dtype != BF16:
            text = module.UNPACK_SUM.value
            inputs |= {9: twice(exact[0] - main[0]), 10: twice(exact[1] - main[1])}
        for got, code, row in zip(run(text, inputs), codes(), (0, 1, 0, 1), strict=True):
            want = ((code - zeros[row]) * exact[row]).to(BF16).double()
            if dtype == BF16:
                assert torch.equal(got, want)
            else:  # the small part's product is rounded too
                assert (got - want).abs().max() <= want.abs().max() / 128
                assert (got - want).norm() < 5e-4 * want.norm()


def test_codes_are_used_as_128_more():
    module = gluon_module("quantized_few")
    if module is None:
        pytest.skip("needs Gluon")
    for got, code in zip(run(module.UNPACK.value, {4: WORDS}), codes(), strict=True):
        assert torch.equal(got, code + 128)
