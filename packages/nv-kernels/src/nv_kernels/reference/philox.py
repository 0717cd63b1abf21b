"""Counter-based random numbers: Philox4x32-10.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; bit for bit what
`triton.language.philox` computes.

Owns the generator and the uniform of a draw. Never holds state.
"""

from __future__ import annotations

import torch

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(key: tuple[torch.Tensor, torch.Tensor], counter: Words) -> Words:
    """Encrypt counters under keys.

    Args:
        key: low and high word, each [...] int64 in [0, 2^32).
        counter: four words, each [...] int64 in [0, 2^32).

    Returns:
        Four random words, each [...] int64 in [0, 2^32).
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(NUM_ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # wrap around at 2^64
        c0, c1, c2, c3 = (
            (product1 >> 32 & MASK) ^ c1 ^ k0,
            product1 & MASK,
            (product0 >> 32 & MASK) ^ c3 ^ k1,
            product0 & MASK,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def uniform(seeds: torch.Tensor, positions: torch.Tensor, draw: int) -> torch.Tensor:
    """Give the uniform number of each row's draw.

    Args:
        seeds: [R] int64; the key is its low and high 32 bits.
        positions: [R] int64, low 32 bits used.
        draw: the round, 0 for a row's first number.

    Returns:
        [R] float64 in [0, 1), multiples of 2^-24: exact in fp32 too.
    """
    zero = torch.zeros_like(seeds)
    key = (seeds & MASK, seeds >> 32 & MASK)
    first = philox(key, (zero + draw, positions & MASK, zero, zero))[0]
    return (first >> 8).double() / 2**24
