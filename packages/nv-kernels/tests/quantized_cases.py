"""Small quantized weights of every kind, with random codes and scales."""

from __future__ import annotations

import numpy as np
import torch
from nv_kernels import Blocks, Fp8, Grouped, Int8
from nv_kernels.linear.quantized.block_kinds import BLOCK_KINDS

SCALES_AT = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Random normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random bytes: codes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)


def blocks(kind: str, rows: int, columns: int, seed: int = 0) -> Blocks:
    """Blocks of random bytes whose fp16 scales are finite and of a usual size."""
    layout = BLOCK_KINDS[kind]
    count = rows * columns // layout.num_values
    values = random_bytes(count, layout.num_bytes, seed=seed).numpy()
    generator = np.random.default_rng(seed)
    for at in SCALES_AT.get(kind, (0,)):
        scale = generator.normal(size=(count, 1), scale=0.02).astype(np.float16)
        values[:, at : at + 2] = scale.view(np.uint8)
    return Blocks((torch.from_numpy(values).view(rows, -1),), kind)


def grouped(
    rows: int, columns: int, *, bits: int, group: int, offset: str | None = None, seed: int = 0
) -> Grouped:
    """Random codes; offset is None, "zero points" (0 and 15 or 255 among them) or "floats"."""
    codes = random_bytes(rows, columns * bits // 8, seed=seed)
    groups = columns // group
    scale = draw(rows, groups, seed=seed + 1, scale=0.02).bfloat16()
    offsets = None
    if offset == "zero points":
        offsets = random_bytes(rows, groups, seed=seed + 2) >> (8 - bits)
        offsets[0], offsets[-1] = 0, 2**bits - 1
    elif offset == "floats":
        offsets = draw(rows, groups, seed=seed + 2, scale=0.1).bfloat16()
    return Grouped(codes, scale, offsets, bits)


def fp8(rows: int, columns: int, *, by: str, inputs: str | float | None, seed: int = 0) -> Fp8:
    """Random e4m3 codes, with scales by "row" or by "block"."""
    codes = draw(rows, columns, seed=seed, scale=60.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    shape = (rows,) if by == "row" else (-(-rows // 128), -(-columns // 128))
    return Fp8(codes, draw(*shape, seed=seed + 1, scale=1e-3).abs() + 1e-4, inputs)


def int8(rows: int, columns: int, seed: int = 0) -> Int8:
    """Random codes from -128 to 127."""
    codes = random_bytes(rows, columns, seed=seed).view(torch.int8)
    return Int8(codes, draw(rows, seed=seed + 1, scale=1e-3).abs() + 1e-4)


RECORDS = {
    **{kind: lambda n, k, kind=kind: blocks(kind, n, k) for kind in BLOCK_KINDS},
    "4 bits": lambda n, k: grouped(n, k, bits=4, group=32),
    "4 bits, zero points": lambda n, k: grouped(n, k, bits=4, group=128, offset="zero points"),
    "4 bits, floats": lambda n, k: grouped(n, k, bits=4, group=64, offset="floats"),
    "4 bits, one group": lambda n, k: grouped(n, k, bits=4, group=k),
    "8 bits": lambda n, k: grouped(n, k, bits=8, group=32),
    "8 bits, zero points": lambda n, k: grouped(n, k, bits=8, group=128, offset="zero points"),
    "fp8, weight only": lambda n, k: fp8(n, k, by="row", inputs=None),
    "fp8, tokens": lambda n, k: fp8(n, k, by="row", inputs="token"),
    "fp8, static": lambda n, k: fp8(n, k, by="row", inputs=0.01),
    "fp8, blocks": lambda n, k: fp8(n, k, by="block", inputs="block"),
    "fp8, blocks, weight only": lambda n, k: fp8(n, k, by="block", inputs=None),
    "int8": int8,
}
