"""Zeroes the rows of a tensor from a row on whose number is on the device.

The FlashAttention packages do not write the padding rows of a step. This kernel writes those rows
only; `masked_fill_` would read and write the whole tensor. The host never reads the number, so a
CUDA graph can capture it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.triton_previous import wait_for_previous

if TYPE_CHECKING:
    import torch

PROGRAMS = 128  # about a card's multiprocessors; most have no row to write
BLOCK = 1024


@triton.jit
def zero_tail_kernel(
    out_ptr,
    first_ptr,
    num_rows,
    WIDTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program zeroes every PROGRAMS-th row, of WIDTH elements, from *first on."""
    wait_for_previous(PDL)
    lane = tl.arange(0, BLOCK)
    nothing = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
    row = tl.load(first_ptr).to(tl.int64) + tl.program_id(0)
    while row < num_rows:
        for start in range(0, WIDTH, BLOCK):
            tl.store(out_ptr + row * WIDTH + start + lane, nothing, mask=start + lane < WIDTH)
        row += PROGRAMS


def zero_tail(out: torch.Tensor, first: torch.Tensor) -> None:
    """Zero, in place, the rows from `first` on.

    Args:
        out: [T, Hq, D], contiguous.
        first: [] int32 or int64, 0 to T.
    """
    assert out.is_contiguous()
    num_rows = out.shape[0]
    if num_rows == 0:
        return
    zero_tail_kernel[(min(PROGRAMS, num_rows),)](
        out,
        first,
        num_rows,
        WIDTH=out[0].numel(),
        PROGRAMS=PROGRAMS,
        BLOCK=BLOCK,
        **dependent_launch(out),
    )
