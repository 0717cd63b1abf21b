"""Integer arithmetic on the host for the grid of a launch.

Triton's own `cdiv` and `next_power_of_2`, which kernels may call too, take microseconds on the
host, and a launch needs several.
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
