"""The two products of an adapter of low rank (Hu et al. 2021, arXiv 2106.09685): B (A x).

Owns their rounding: the first is kept in fp32 and rounded to B's dtype before the second; the
second is added to the product of the base in fp32, and the sum is rounded to its dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.elementwise.gate import batch_invariant_silu_and_mul
from nv_kernels.linear.definitions import batch_invariant_linear
from nv_kernels.op import op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nv_kernels.linear.lora.plan import LoraPlan


@op(triton="nv_kernels.linear.lora.triton_shrink", cpp="nv_kernels.cpp.lora")
def lora_shrink(x: torch.Tensor, a: torch.Tensor, plan: LoraPlan) -> torch.Tensor:
    """Multiply each token by the A of its adapter.

    Args:
        x: [T, K]; rounded to a's dtype.
        a: [S, P * R, K] of S adapters: the A of each of P parts, one below the other.
        plan: the tokens by adapter.

    Returns:
        [Z, T, P * R] fp32, whose sum over Z is the product. Rows of tokens without an adapter are
        undefined.
    """
    out = torch.zeros(1, len(x), a.shape[1], dtype=torch.float32, device=x.device)
    for adapter, tokens in plan.groups():
        rows = x[tokens].to(a.dtype).float()
        out[0, tokens] = batch_invariant_linear.definition(rows, a[adapter].float())
    return out


@op(triton="nv_kernels.linear.lora.triton_expand", cpp="nv_kernels.cpp.lora")
def lora_expand(
    product: torch.Tensor,
    hidden: torch.Tensor,
    b: torch.Tensor,
    part_rows: Sequence[int],
    plan: LoraPlan,
) -> torch.Tensor:
    """Add to each token's product its hidden values times the B of its adapter.

    Args:
        product: [T, N], or [P, T, N] partials; the first is changed in place.
        hidden: [Z, T, parts * R] of `lora_shrink`.
        b: [S, N, R] of S adapters.
        part_rows: rows of each part, N together: part i reads values i R to (i + 1) R.
        plan: the tokens by adapter.

    Returns:
        `product`. Tokens without an adapter keep their bits.
    """
    first = product[0] if product.dim() == 3 else product
    for adapter, tokens in plan.groups():
        start, values = 0, hidden[:, tokens].sum(0).to(b.dtype).float()  # [tokens, parts * R]
        for rows, part in zip(part_rows, torch.split(values, b.shape[2], 1), strict=True):
            columns = slice(start, start + rows)
            delta = batch_invariant_linear.definition(
                part.contiguous(), b[adapter, columns].float()
            )
            first[tokens, columns] = (first[tokens, columns].float() + delta).to(first.dtype)
            start = columns.stop
    return product


@op(triton="nv_kernels.linear.lora.triton_expand", cpp="nv_kernels.cpp.lora")
def lora_expand_gated(
    product: torch.Tensor,
    hidden: torch.Tensor,
    b: torch.Tensor,
    part_rows: Sequence[int],
    plan: LoraPlan,
) -> torch.Tensor:
    """Add as `lora_expand`, and gate: silu(gate) * up, as `batch_invariant_silu_and_mul`.

    Args:
        product: [T, 2F], gate then up; it may be changed.
        hidden: [Z, T, 2R] of `lora_shrink`.
        b: [S, 2F, R] of S adapters.
        part_rows: (F, F).
        plan: the tokens by adapter.

    Returns:
        [T, F] in product's dtype.
    """
    return batch_invariant_silu_and_mul.definition(
        lora_expand.definition(product, hidden, b, part_rows, plan)
    )
