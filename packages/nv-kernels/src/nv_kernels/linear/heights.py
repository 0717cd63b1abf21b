"""Matrix products on a CPU whose rows do not depend on the number of rows.

A library chooses its kernel, and with it the order in which a row's products are summed, by the
number of rows; in some libraries the order also depends on a row's place. So rows are multiplied in
blocks of a few fixed heights, the last block padded. Only heights that give bitwise equal rows are
used together, and a height at which a row's place matters is not used. If it matters at every
height, rows are multiplied one by one.

In fp32 two orders of summation differ in nearly every output, so comparing outputs is a proof if
there are enough of them: rows with fewer than LEAST_OUTPUTS are multiplied one by one (MKL without
AVX-512 has other orders there). In 16 bits most differences are rounded away, and agreement proves
nothing: there a single height is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Product = Callable[[torch.Tensor, torch.Tensor], object]
    """Multiplies contiguous rows [h, K] into [h, N]."""

TALL = 64  # measured with MKL and oneDNN: blocks of 64 rows cost no more than one product
HEIGHTS = (TALL, 32, 16, 8, 4, 2)
LEAST_OUTPUTS = 16


def agreeing_heights(
    product: Product, num_columns: int, num_outputs: int, heights: Sequence[int] = HEIGHTS
) -> tuple[int, ...]:
    """Measure which heights give bitwise the same rows, in fp32.

    Args:
        product: the library's product.
        num_columns: K.
        num_outputs: N.
        heights: tallest first; each divides the tallest.

    Returns:
        The largest set that agrees, tallest first; of equally large sets the one with taller
        heights. (1,) if a row's place matters at every height, or there are too few outputs to
        compare.
    """
    if num_outputs < LEAST_OUTPUTS:
        return (1,)
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(heights[0], num_columns, generator=generator, dtype=torch.float32, device="cpu")
    groups: list[tuple[torch.Tensor, list[int]]] = []
    for height in heights:
        if _places_matter(product, x[:1].repeat(height, 1), num_outputs):
            continue
        rows = x.new_empty(heights[0], num_outputs)
        for block, out in zip(torch.split(x, height), torch.split(rows, height), strict=True):
            product(block, out)
        for first, members in groups:
            if torch.equal(first, rows):
                members.append(height)
                break
        else:
            groups.append((rows, [height]))
    return max((tuple(members) for _, members in groups), key=len, default=(1,))


def _places_matter(product: Product, same: torch.Tensor, num_outputs: int) -> bool:
    """Whether equal rows [h, K] give different results."""
    out = same.new_empty(same.shape[0], num_outputs)
    product(same, out)
    return not torch.equal(out, out[:1].expand_as(out))


def multiply_in_blocks(
    x: torch.Tensor, num_outputs: int, product: Product, heights: Sequence[int]
) -> torch.Tensor:
    """Multiply rows so that a row depends neither on the others nor on their number.

    Args:
        x: [T, K].
        num_outputs: N.
        product: the library's product.
        heights: the heights that agree, tallest first.

    Returns:
        [T, N] in x's dtype.
    """
    num_rows, tallest = x.shape[0], heights[0]
    full = num_rows // tallest * tallest
    last = min((h for h in heights if h >= num_rows - full), default=tallest)
    padded = full + (last if full < num_rows else 0)
    x = functional.pad(x, (0, 0, 0, padded - num_rows)) if padded > num_rows else x.contiguous()
    out = x.new_empty(padded, num_outputs)
    for start in range(0, padded, tallest):
        block, rows = x[start : start + tallest], out[start : start + tallest]
        if tallest > 1:
            product(block, rows)
        else:  # use new tensors, because a row's address would matter too
            alone = torch.empty_like(rows)
            product(block.clone(), alone)
            rows.copy_(alone)
    return out[:num_rows]
