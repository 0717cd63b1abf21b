"""Stores a step's drawn tokens in the rows and in the ring for the host, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.triton_previous import wait_for_previous

if TYPE_CHECKING:
    import torch

    from nv_kernels.step.tables import TokenRing


@triton.jit(do_not_specialize=["num_rows", "num_entries", "width"])
def keep_tokens_kernel(
    token_ids_ptr, slots_ptr, last_token_ptr, entries_ptr, count_ptr,
    num_rows, num_entries, width, RING: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store tokens, in a single program, which also counts the step."""
    wait_for_previous(PDL)
    entry = entries_ptr
    if RING:
        count = tl.load(count_ptr)
        entry = entries_ptr + (count % num_entries) * width
        tl.store(count_ptr, count + 1)
    for start in tl.range(0, num_rows, CHUNK, num_stages=1):
        row = start + tl.arange(0, CHUNK)
        inside = row < num_rows
        token = tl.load(token_ids_ptr + row, mask=inside, other=0)
        slot = tl.load(slots_ptr + row, mask=inside, other=0)
        tl.store(last_token_ptr + slot, tl.maximum(token, 0), mask=inside)
        if RING:
            tl.store(entry + row, token, mask=inside)


def keep_tokens(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
    ring: TokenRing | None = None,
) -> None:
    """Store the drawn tokens; see `nv_kernels.step.rows.keep_tokens`."""
    entries, count = (ring.entries, ring.count) if ring is not None else (token_ids, token_ids)
    sizes = tuple(ring.entries.shape) if ring is not None else (1, 1)
    keep_tokens_kernel[(1,)](
        token_ids, slots, last_token, entries, count, token_ids.shape[0], *sizes,
        RING=ring is not None, CHUNK=512, num_warps=4, **dependent_launch(token_ids),
    )  # fmt: skip
