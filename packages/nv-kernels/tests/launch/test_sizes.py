"""The host's integer arithmetic against Triton's own."""

import triton
from nv_kernels.launch.sizes import cdiv, next_power_of_2


def test_powers_of_two():
    sizes = [*range(1, 5000), *(2**k + d for k in range(12, 40) for d in (-1, 0, 1))]
    assert [next_power_of_2(n) for n in sizes] == [triton.next_power_of_2(n) for n in sizes]
    assert next_power_of_2(0) == 1


def test_quotients():
    pairs = [(a, b) for a in (*range(200), 16384, 151936) for b in (1, 2, 7, 32, 64, 100, 256)]
    assert [cdiv(*pair) for pair in pairs] == [triton.cdiv(*pair) for pair in pairs]
