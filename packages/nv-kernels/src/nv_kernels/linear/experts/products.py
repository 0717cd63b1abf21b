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
    from collections.abc import Callable

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

    def product(rows: torch.Tensor, expert: int) -> torch.Tensor:
        added = None if bias is None else bias[expert]
        return gate(batch_invariant_linear.definition(rows, gate_up[expert], added))

    count, outputs, _ = gate_up.shape
    return by_expert(of_entries(x, routing), routing, count, outputs // 2, product)


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

    def product(rows: torch.Tensor, expert: int) -> torch.Tensor:
        added = None if bias is None else bias[expert]
        return batch_invariant_linear.definition(rows, down[expert], added)

    count, outputs, _ = down.shape
    return weighted(by_expert(gated, routing, count, outputs, product), routing)


def of_entries(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Repeat each token for its experts, without a copy: [T, K] -> [T, k, K]."""
    return x[:, None].expand(-1, routing.experts.shape[1], -1)


def by_expert(
    x: torch.Tensor,
    routing: Routing,
    num_experts: int,
    outputs: int,
    product: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """Multiply each entry by its expert's matrix.

    Args:
        x: [T, k, K], a row for each entry.
        routing: of the tokens.
        num_experts: E.
        outputs: N.
        product: multiplies rows [n, K] by the matrix of an expert: [n, N].

    Returns:
        [T, k, N] in x's dtype.
    """
    out = x.new_empty(*x.shape[:2], outputs)
    for expert in range(num_experts):
        tokens, slots = torch.where(routing.experts == expert)
        if len(tokens):
            out[tokens, slots] = product(x[tokens, slots], expert)
    return out


def weighted(products: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Multiply by the routing's weights: [T, k, N] -> partials [k, T, N]."""
    return (products * routing.weights[..., None]).transpose(0, 1).contiguous()


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
