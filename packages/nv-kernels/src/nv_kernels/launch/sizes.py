"""Whole-number arithmetic of a launch, as a grid needs it.

Owns `cdiv` and `next_power_of_2` for the host. Triton's own, which may also be called in a kernel,
take microseconds, and a launch has several. Never in a kernel.
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
        n: at least 1; 0 gives 1, where Triton's gives 0.
    """
    return 1 << max(n - 1, 0).bit_length()
