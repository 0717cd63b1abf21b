"""The generator against published vectors and against Triton's own."""

import os
import subprocess
import sys

import pytest
import torch
from nv_kernels.sampling.philox import philox, uniform, uniforms

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text):
    return torch.tensor([[int(word, 16)] for word in text.split()])


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_known_answers(counter, key, output):
    assert torch.equal(philox(words(key), words(counter)), words(output))


def test_uniforms_are_the_first_word_s_upper_24_bits():
    seeds = torch.tensor([0x299F31D0A4093822, -1, 5])
    positions = torch.tensor([2**32 + 7, 2**31, 0])
    zero = torch.zeros_like(seeds)
    key = torch.stack((seeds & 0xFFFFFFFF, seeds >> 32 & 0xFFFFFFFF))
    u = uniforms(seeds, positions, 3, 2)
    for column, draw in enumerate((3, 4)):
        counter = torch.stack((zero + draw, torch.tensor([7, 2**31, 0]), zero, zero))
        first = philox(key, counter)[0]
        assert torch.equal(u[:, column], (first // 256).double() / 2**24)
    assert torch.equal(u.float().double(), u)


def test_uniform_is_uniform_over_seeds_positions_and_rounds():
    count = 20000
    steps, zero = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    for u in (uniform(steps, zero, 0), uniform(zero, steps, 0), uniform(zero + 9, steps, 4)):
        observed = torch.histc(u.float(), bins=50, min=0, max=1)
        statistic = ((observed - count / 50) ** 2 / (count / 50)).sum()
        assert statistic < 85.35  # 99.9 % of chi-square with 49 degrees of freedom
        assert 0 <= u.min() < u.max() < 1


TRITON = """
import torch, triton, triton.language as tl
from nv_kernels.sampling.philox import uniform

@triton.jit
def draw(seeds, positions, out, round_, N: tl.constexpr):
    rows = tl.arange(0, N)
    position = tl.load(positions + rows).to(tl.int32)
    zero = tl.zeros((N,), tl.int32)
    a, b, c, d = tl.philox(tl.load(seeds + rows), zero + round_, position, zero, zero)
    bits = a.to(tl.uint32, bitcast=True) >> 8
    tl.store(out + rows, bits.to(tl.float32) * 5.9604644775390625e-08)

torch.manual_seed(0)
seeds = torch.randint(-(2**63), 2**63 - 1, (64,))
positions = torch.randint(0, 2**33, (64,))
for round_ in (0, 1, 17):
    out = torch.empty(64)
    draw[(1,)](seeds, positions, out, round_, 64)
    assert torch.equal(out.double(), uniform(seeds, positions, round_)), round_
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is a dependency on Linux alone")
def test_equals_triton_bit_for_bit(tmp_path):
    file = tmp_path / "draw.py"
    file.write_text(TRITON)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, str(file)], check=True, env=environment)
