"""The products of adapters of low rank on a CPU: those of `nv_kernels.cpp.linear`, per adapter.

A token's bits do not depend on the other tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.cpp.linear import fp32_product
from nv_kernels.elementwise.gate import batch_invariant_silu_and_mul
from nv_kernels.linear.lora import products

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nv_kernels.linear.lora.plan import LoraPlan


def lora_shrink(x: torch.Tensor, a: torch.Tensor, plan: LoraPlan) -> torch.Tensor:
    """Multiply by A; see `nv_kernels.reference.lora_shrink`."""
    x, out = x.to(a.dtype), x.new_empty(1, len(x), a.shape[1], dtype=torch.float32)
    for adapter, tokens in plan.groups():
        is_all = len(tokens) == len(x)
        product = fp32_product(x if is_all else x[tokens], a[adapter])
        if product is None:
            return products.lora_shrink.definition(x, a, plan)
        if is_all:
            return product[None]
        out[0, tokens] = product
    return out


def lora_expand(
    product: torch.Tensor,
    hidden: torch.Tensor,
    b: torch.Tensor,
    part_rows: Sequence[int],
    plan: LoraPlan,
) -> torch.Tensor:
    """Multiply by B and add; see `nv_kernels.reference.lora_expand`."""
    first = product[0] if product.dim() == 3 else product
    values = hidden[0] if len(hidden) == 1 else hidden.sum(0)
    values, rank = values.to(b.dtype), b.shape[2]
    deltas = []
    for adapter, tokens in plan.groups():
        own = values if len(tokens) == len(values) else values[tokens]
        delta = torch.empty(len(tokens), b.shape[1], dtype=torch.float32)
        start = 0
        for part, rows in enumerate(part_rows):
            columns = slice(start, start + rows)
            inputs = own[:, part * rank : (part + 1) * rank]
            found = fp32_product(inputs, b[adapter, columns])
            if found is None:
                return products.lora_expand.definition(product, hidden, b, part_rows, plan)
            delta[:, columns] = found
            start = columns.stop
        deltas.append((tokens, delta))
    for tokens, delta in deltas:
        if len(tokens) == len(first):
            first.copy_(first.float() + delta)
        else:
            first[tokens] = (first[tokens].float() + delta).to(first.dtype)
    return product


def lora_expand_gated(
    product: torch.Tensor,
    hidden: torch.Tensor,
    b: torch.Tensor,
    part_rows: Sequence[int],
    plan: LoraPlan,
) -> torch.Tensor:
    """Multiply by B, add and gate; see `nv_kernels.reference.lora_expand_gated`."""
    return batch_invariant_silu_and_mul(lora_expand(product, hidden, b, part_rows, plan))
