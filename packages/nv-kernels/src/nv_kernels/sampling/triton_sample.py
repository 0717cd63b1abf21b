"""One token per row from its logits: the launches of docs/architecture.md, "The draw".

Owns the choice of kernels, and their scratch memory. It never waits for the device, so that a CUDA
graph can capture it; only the host flag any_filter of SamplingTensors chooses the kernels.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.sampling.triton_draw import GROUP, pick_kernel, statistics_kernel
from nv_kernels.sampling.triton_filtering import filter_kernel

if TYPE_CHECKING:
    from nv_kernels.sampling.parameters import SamplingTensors

TILE = 128  # tokens per tile, at every batch size: a draw must not depend on other rows
BINS = 1024
PICK_WARPS = 4
STEP, AHEAD = 32, 2  # tiles per read of a filter program, and reads in flight
SPAN = 256  # tiles that a pass of top-p reads between two checks whether it may end
WARPS, REGISTERS = 8, 128  # per filter program: two programs fit a processor


def sample(logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """Draw one token per row.

    Args:
        logits: [R, V] bf16, fp16 or fp32; rows may be strided, V is at most 2^31.
        sampling: parameters of the R rows; rows may differ in all of them.

    Returns:
        Token ids [R] int64. A row's draw does not depend on the other rows.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logits.shape[0]:
        _draw(logits, _contiguous(sampling), out)
    return out


def _contiguous(sampling: SamplingTensors) -> SamplingTensors:
    """Make each parameter contiguous: the kernels read that of row r at r."""
    return replace(
        sampling,
        temperature=sampling.temperature.contiguous(),
        top_k=sampling.top_k.contiguous(),
        top_p=sampling.top_p.contiguous(),
        min_p=sampling.min_p.contiguous(),
        seeds=sampling.seeds.contiguous(),
        positions=sampling.positions.contiguous(),
    )


def _draw(logits: torch.Tensor, sampling: SamplingTensors, out: torch.Tensor) -> None:
    rows, vocabulary = logits.shape
    num_ids = sampling.num_ids
    num_groups = cdiv(vocabulary if num_ids is None else num_ids, TILE * GROUP.value)
    groups = next_power_of_2(num_groups)
    tiles = groups * GROUP.value
    sizes = (logits.stride(0), vocabulary, num_ids, num_groups)
    options = dependent_launch(logits)
    make = partial(torch.empty, dtype=torch.float32, device=logits.device)
    num_tiles = num_groups * GROUP.value
    statistics = (make(rows, num_tiles), make(rows, num_tiles))  # maximum, mass
    statistics_kernel[(rows, num_groups)](
        logits,
        sampling.temperature,
        *statistics,
        *sizes,
        TILE,
        not sampling.any_filter,
        num_warps=4,
        **options,
    )
    if not sampling.any_filter:
        pick_kernel[(rows,)](
            logits, sampling.temperature, sampling.seeds, sampling.positions, *statistics, out,
            *sizes, groups, TILE, num_warps=PICK_WARPS, **options,
        )  # fmt: skip
        return
    tile_list = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    bins = torch.empty(rows, BINS, dtype=torch.int32, device=logits.device)
    filter_kernel[(rows,)](
        logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p,
        sampling.seeds, sampling.positions, *statistics, tile_list, make(rows, tiles), bins, out,
        *sizes, groups, tiles, TILE, BINS, STEP, AHEAD, SPAN,
        num_warps=WARPS, maxnreg=REGISTERS, **options,
    )  # fmt: skip
