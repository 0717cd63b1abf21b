"""The products of a mixture of experts, in plain torch: each token by its experts' matrices only.

Owns the rounding: a product and its bias are added in fp32 and rounded to the tokens' dtype, then
gated or multiplied by the routing's weight, and rounded again. A version may leave out the first of
the two. The sum over a token's experts is in fp32, in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.linear.definitions import batch_invariant_linear
from nv_kernels.linear.experts.gate import SWIGLU
from nv_kernels.op import op

if TYPE_CHECKING:
    from nv_kernels.linear.experts.gate import Gate
    from nv_kernels.linear.experts.routing import Routing


@op(triton="nv_kernels.linear.experts.triton_products")
def expert_gated_linear(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    gate: Gate = SWIGLU,
) -> torch.Tensor:
    """Multiply each token by gate and up of its experts, and gate.

    Args:
        x: [T, K].
        gate_up: [E, 2F, K], gate rows then up rows, in x's dtype.
        routing: of the tokens.
        bias: [E, 2F] or None.
        gate: how gate and up become one; the default is silu(gate) * up.

    Returns:
        The gated products [T, k, F] in x's dtype. A token's bits do not depend on the others, if
        its routing has tiles of one height.
    """
    out = x.new_empty(*routing.experts.shape, gate_up.shape[1] // 2)
    for expert, matrix in enumerate(gate_up):
        tokens, slots = torch.where(routing.experts == expert)
        added = None if bias is None else bias[expert]
        out[tokens, slots] = gate(batch_invariant_linear.definition(x[tokens], matrix, added))
    return out


@op(triton="nv_kernels.linear.experts.triton_products")
def expert_linear(
    gated: torch.Tensor, down: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply by each expert's last matrix, and by the routing's weight.

    Args:
        gated: [T, k, F], the result of `expert_gated_linear`.
        down: [E, N, F], in gated's dtype.
        routing: of the tokens.
        bias: [E, N], added before the weight multiplies, or None.

    Returns:
        Partials [k, T, N] in gated's dtype, whose sum over k is the layer's result.
    """
    out = gated.new_empty(*gated.shape[:2], down.shape[1])
    for expert, matrix in enumerate(down):
        tokens, slots = torch.where(routing.experts == expert)
        added = None if bias is None else bias[expert]
        out[tokens, slots] = batch_invariant_linear.definition(gated[tokens, slots], matrix, added)
    return (out * routing.weights[..., None]).transpose(0, 1).contiguous()


@op(triton="nv_kernels.linear.experts.triton_products")
def sum_partials(partials: torch.Tensor) -> torch.Tensor:
    """Sum [P, T, N] over P, in fp32 and in order.

    Args:
        partials: [P, T, N].

    Returns:
        [T, N] in partials' dtype.
    """
    total = partials[0].float()
    for part in partials[1:]:
        total = total + part
    return total.to(partials.dtype)
