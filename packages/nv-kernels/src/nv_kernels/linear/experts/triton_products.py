"""The products of a mixture of experts on a card, and the sum of their partials."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv
from nv_kernels.launch.triton_previous import wait_for_previous
from nv_kernels.linear.experts.gate import SWIGLU
from nv_kernels.linear.experts.triton_few import few_down, few_gated
from nv_kernels.linear.experts.triton_tiles import tiles

if TYPE_CHECKING:
    from nv_kernels.linear.experts.gate import Gate
    from nv_kernels.linear.experts.routing import Routing

BLOCK = 1024


@triton.jit(do_not_specialize=["num_values"])
def sum_partials_kernel(
    partials, out, num_values, PARTIALS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Each program sums BLOCK values."""
    wait_for_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_values
    total = tl.load(partials + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTIALS):
        start = tl.cast(num_values, tl.int64) * part
        total += tl.load(partials + start + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


def expert_gated_linear(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    gate: Gate = SWIGLU,
) -> torch.Tensor:
    """Multiply and gate; see `nv_kernels.reference.expert_gated_linear`. It rounds only once."""
    product = tiles if routing.tile else few_gated
    return product(x.contiguous(), gate_up.contiguous(), bias, routing, gate)


def expert_linear(
    gated: torch.Tensor, down: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply; see `nv_kernels.reference.expert_linear`. It rounds only once."""
    gated, down = gated.contiguous(), down.contiguous()
    if routing.tile:
        return tiles(gated, down, bias, routing, None)
    return few_down(gated, down, bias, routing, is_summed=False)


def sum_partials(partials: torch.Tensor) -> torch.Tensor:
    """Sum [P, T, N] over P; see `nv_kernels.reference.sum_partials`."""
    partials = partials.contiguous()
    out = torch.empty_like(partials[0])
    if out.numel():
        sum_partials_kernel[(cdiv(out.numel(), BLOCK),)](
            partials, out, out.numel(), partials.shape[0], BLOCK, num_warps=4,
            **dependent_launch(partials),
        )  # fmt: skip
    return out
