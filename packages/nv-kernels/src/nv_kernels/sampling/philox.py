"""Counter-based random numbers: Philox4x32-10.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; it has the same
bits as `triton.language.philox`. It has no state.
"""

from __future__ import annotations

import torch

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xCD9E8D57, 0xD2511F53)  # for the third word and for the first
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10


def philox(key: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Encrypt counters under keys.

    Args:
        key: [2, N] int64 in [0, 2^32), low word first.
        counter: [4, N] int64 in [0, 2^32).

    Returns:
        Random words [4, N] int64 in [0, 2^32).
    """
    device = key.device
    multipliers = torch.tensor(MULTIPLIERS, device=device)[:, None]
    steps = (
        torch.tensor(KEY_STEPS, device=device) * torch.arange(NUM_ROUNDS, device=device)[:, None]
    )
    keys = (key + steps[:, :, None]) & MASK  # [NUM_ROUNDS, 2, N]
    even, odd = counter[0::2], counter[1::2]  # [2, N] each
    for round_key in keys:
        product = even.flip(0) * multipliers  # 64 bits, wrapped around into the sign
        even = (product >> 32 & MASK) ^ odd ^ round_key
        odd = product & MASK
    return torch.stack((even, odd), dim=1).flatten(0, 1)


def uniforms(
    seeds: torch.Tensor, positions: torch.Tensor, first_round: int, num_rounds: int
) -> torch.Tensor:
    """Return the uniform numbers of some rounds of each row.

    Args:
        seeds: [R] int64; the key is its low and high 32 bits.
        positions: [R] int64, low 32 bits used.
        first_round: first round, 0 for a draw's first number.
        num_rounds: number of rounds from there.

    Returns:
        [R, num_rounds] float64 in [0, 1), multiples of 2^-24: exact in fp32 too.
    """
    rounds = torch.arange(first_round, first_round + num_rounds, device=seeds.device)
    shape = (seeds.shape[0], num_rounds)
    key = torch.stack((seeds & MASK, seeds >> 32 & MASK))[..., None]  # [2, R, 1]
    position = (positions & MASK)[:, None]
    zero = torch.zeros_like(position)
    counter = [word.expand(shape) for word in (rounds, position, zero, zero)]
    words = philox(key.expand(2, *shape).flatten(1), torch.stack(counter).flatten(1))
    return (words[0] >> 8).view(shape).double() / 2**24


def uniform(seeds: torch.Tensor, positions: torch.Tensor, draw: int) -> torch.Tensor:
    """Return the uniform number of one round, [R]; see `uniforms`."""
    return uniforms(seeds, positions, draw, 1)[:, 0]
