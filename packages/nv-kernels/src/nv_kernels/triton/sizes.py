"""Whole-number arithmetic of a launch, as a grid needs it.

Owns `triton.cdiv` and `triton.next_power_of_2` for the host: Triton's own take ten times as long,
for they may also be called in a kernel, and a launch has several. Never in a kernel.
"""


def cdiv(a: int, b: int) -> int:
    """Divide and round up.

    Args:
        a: at least 0.
        b: at least 1.
    """
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Round up to a power of two.

    Args:
        n: at least 1.
    """
    return 1 << (n - 1).bit_length()
