"""Draw key: the 64-bit key from which a sequence's draws follow.

Owns how a seed becomes keys that no two sequences share. Never draws: that is `nk.sample`.
"""

_MASK = 2**64 - 1


def mix64(value: int) -> int:
    """A bijection of 64-bit integers in which every input bit moves every output bit.

    It is the output function of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, 2014; constants of Stafford's variant 13), after one step of its golden-ratio state,
    so that 0 does not stay 0.
    """
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def draw_key(seed: int, *stream: int) -> int:
    """The 64-bit key of a sequence's draws.

    Args:
        seed: the request's seed, or the engine's; any integer, taken modulo 2^64.
        stream: what tells apart sequences under that seed: the completion index for a request's
            own seed; the request number and the completion index for the engine's.
    """
    key = mix64(seed & _MASK)
    for part in stream:
        key = mix64(key ^ (part & _MASK))
    return key
