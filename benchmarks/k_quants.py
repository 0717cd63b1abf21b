"""Blocks of Q4_K, Q5_K and Q6_K by rounding to nearest; the gguf library only reads these.

Each group's scale spans its values, each block's scale spans its groups' scales, and a value is
rounded to the nearest code. llama.cpp searches for scales with a smaller error.
"""

import numpy as np

BLOCK = 256
FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Kinds that llama.cpp takes for matrices whose rows are not whole blocks."""


def quantize_k(values: np.ndarray, kind: str) -> np.ndarray:
    """Quantize fp32 [N, K], K a multiple of 256: uint8 [N, bytes]."""
    blocks = values.reshape(-1, BLOCK)
    packed = six_bits(blocks) if kind == "Q6_K" else with_mins(blocks, 4 if kind == "Q4_K" else 5)
    return packed.reshape(len(values), -1)


def with_mins(blocks: np.ndarray, bits: int) -> np.ndarray:
    """Q4_K and Q5_K: d * scale * q - dmin * min, with scales and mins of 6 bits for 32 values."""
    groups = blocks.reshape(-1, 8, 32)
    low, high = groups.min(2).clip(max=0), groups.max(2).clip(min=0)
    d, scales, step = of_groups((high - low) / (2**bits - 1), 63)
    dmin, mins, least = of_groups(-low, 63)
    q = codes(groups + least[..., None], step[..., None], 0, 2**bits - 1)
    fifth = (q >> 4 << np.arange(8, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8)
    pairs = (q & 15).reshape(-1, 4, 2, 32)
    low_halves = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    packed = [
        scales[:, :4] | scales[:, 4:] >> 4 << 6,
        mins[:, :4] | mins[:, 4:] >> 4 << 6,
        scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4,
    ]
    middle = [fifth] if bits == 5 else []
    return np.concatenate([halves(d), halves(dmin), *packed, *middle, low_halves], 1)


def six_bits(blocks: np.ndarray) -> np.ndarray:
    """Q6_K: d * scale * (q - 32), with scales of 8 bits for 16 values."""
    groups = blocks.reshape(-1, 16, 16)
    d, scales, step = of_groups(np.abs(groups).max(2) / 31, 127)
    q = codes(groups, step[..., None], -32, 31).reshape(-1, 2, 4, 32) + np.uint8(32)
    low = q & 15
    low = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], 2)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (q >> 4 << shifts).sum(2, dtype=np.uint8)
    return np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64), scales, halves(d)], 1)


def of_groups(wanted: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each block's fp16 scale [B, 1], the groups' codes [B, G], and what they come to in fp32."""
    d = (wanted.max(1, keepdims=True) / most).astype(np.float16)
    found = codes(wanted, d.astype(np.float32), 0, most)
    return d, found, found * d.astype(np.float32)


def codes(values: np.ndarray, step: np.ndarray, least: int, most: int) -> np.ndarray:
    """Round values / step to whole numbers, 0 where the step is 0; uint8, negative ones wrap."""
    quotients = np.divide(values, step, out=np.zeros_like(values), where=step > 0)
    return np.rint(quotients).clip(least, most).astype(np.int8).view(np.uint8)


def halves(numbers: np.ndarray) -> np.ndarray:
    """The bytes of fp16 [B, 1]."""
    return numbers.view(np.uint8)
