"""Tokens times their experts' quantized matrices, on the tensor cores, in tiles of one expert each.

Owns the kernels and their settings. They find their entries as `triton_tiles` finds them; with one
or two tokens each program takes one entry, whose expert it reads.
"""

# mypy: disable-error-code="assignment, unreachable"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nv_kernels.launch.card import converts_fp8
from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv, next_power_of_2
from nv_kernels.launch.triton_previous import wait_for_previous
from nv_kernels.linear.experts.triton_code_sums import coded_sums, grouped_sums
from nv_kernels.linear.experts.triton_gate import constants
from nv_kernels.linear.experts.triton_tiles import chosen_entries, find_slots, finish_entries

if TYPE_CHECKING:
    from nv_kernels.linear.experts.code_stack import CodeStack
    from nv_kernels.linear.experts.gate import Gate
    from nv_kernels.linear.experts.routing import Routing

BLOCK_N = 64
ENTRY_BLOCK_N = 32
"""Outputs per program; fewer with one or two tokens, so that more programs read weights."""
ENTRY_ROWS = 16
"""Rows of the tile of one entry, the least that a dot takes."""
STAGES = 3
WIDE_TILE = 128
"""The least height that takes 8 warps; a lower tile takes 4."""


@triton.jit
def _multiply(
    x, codes, w_scale, offset, fixed, bias, scales, out, expert, first, entries, is_real,
    num_tokens, STRIDE,
    N: tl.constexpr, PADDED: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, BLOCKS: tl.constexpr,
    INPUTS: tl.constexpr, NATIVE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Compute outputs [first, first + BLOCK_N) of entries [BLOCK_M] of one expert, and store them.

    See `triton_tiles`; codes, w_scale and offset are those of a CodeStack.
    """
    sources = entries // TOP_K if GATED else entries
    sources = tl.where(is_real, sources, 0).to(tl.int64)
    matrix = expert * 2 if GATED else expert
    if GROUP > 0:
        gate, up = grouped_sums(
            x, codes, w_scale, offset, matrix, first, sources, is_real, STRIDE, PADDED, K, GATED,
            BLOCK_M, BLOCK_N, STAGES, GROUP, GROUPS, KIND, OFFSET, ASM,
        )  # fmt: skip
    else:
        gate, up = coded_sums(
            x, codes, w_scale, fixed, matrix, first, sources, is_real, PADDED, K, GATED, BLOCK_M,
            BLOCK_N, STAGES, BLOCKS, INPUTS, NATIVE,
        )  # fmt: skip
    finish_entries(
        gate.T, up.T, bias, scales, out, expert, first, entries, is_real, num_tokens, N, TOP_K,
        GATED, ALPHA, LIMIT, SHIFT, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def sorted_codes_kernel(
    x, codes, w_scale, offset, fixed, bias, scales, out, places, tile_experts, num_tokens, STRIDE,
    N: tl.constexpr, PADDED: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, BLOCKS: tl.constexpr,
    INPUTS: tl.constexpr, NATIVE: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N of the N outputs of a tile of BLOCK_M entries."""
    wait_for_previous(PDL)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // tiles_n
    expert = tl.load(tile_experts + tile)
    if expert < 0:
        return
    entries = tl.load(places + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    _multiply(
        x, codes, w_scale, offset, fixed, bias, scales, out, expert,
        (tl.program_id(0) % tiles_n) * BLOCK_N, entries, entries >= 0, num_tokens, STRIDE, N,
        PADDED, K, TOP_K, GATED, ALPHA, LIMIT, SHIFT, BLOCK_M, BLOCK_N, STAGES, GROUP, GROUPS, KIND,
        OFFSET, BLOCKS, INPUTS, NATIVE, ASM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def slots_codes_kernel(
    x, codes, w_scale, offset, fixed, bias, scales, out, slots, num_tokens, STRIDE,
    N: tl.constexpr, PADDED: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, BLOCKS: tl.constexpr,
    INPUTS: tl.constexpr, NATIVE: tl.constexpr, ASM: tl.constexpr, TOKENS: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N of the N outputs of all entries of an expert, BLOCK_M at a time.

    TOKENS is at least num_tokens. EARLY: the slots are older than the previous kernel.
    """
    expert, first, slot, order, count = find_slots(
        slots, num_tokens, N, BLOCK_N, TOKENS, EARLY, PDL
    )
    for start in range(0, count, BLOCK_M):
        entries, is_real = chosen_entries(slot, order, start, count, TOP_K, BLOCK_M, TOKENS)
        _multiply(
            x, codes, w_scale, offset, fixed, bias, scales, out, expert, first, entries, is_real,
            num_tokens, STRIDE, N, PADDED, K, TOP_K, GATED, ALPHA, LIMIT, SHIFT, BLOCK_M, BLOCK_N,
            STAGES, GROUP, GROUPS, KIND, OFFSET, BLOCKS, INPUTS, NATIVE, ASM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def entry_codes_kernel(
    x, codes, w_scale, offset, fixed, bias, scales, out, experts, num_tokens, STRIDE,
    N: tl.constexpr, PADDED: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, BLOCKS: tl.constexpr,
    INPUTS: tl.constexpr, NATIVE: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N of the N outputs of one entry, in the first row of a tile."""
    wait_for_previous(PDL)
    tiles_n = tl.cdiv(N, BLOCK_N)
    entry = tl.program_id(0) // tiles_n
    row = tl.arange(0, BLOCK_M)
    _multiply(
        x, codes, w_scale, offset, fixed, bias, scales, out, tl.load(experts + entry),
        (tl.program_id(0) % tiles_n) * BLOCK_N, entry + row * 0, row == 0, num_tokens, STRIDE, N,
        PADDED, K, TOP_K, GATED, ALPHA, LIMIT, SHIFT, BLOCK_M, BLOCK_N, STAGES, GROUP, GROUPS, KIND,
        OFFSET, BLOCKS, INPUTS, NATIVE, ASM,
    )  # fmt: skip


def code_tiles(
    x: torch.Tensor,
    stack: CodeStack,
    bias: torch.Tensor | None,
    routing: Routing,
    gate: Gate | None,
    *,
    is_after_gated: bool = False,
) -> torch.Tensor:
    """Multiply the entries of each expert by its matrices.

    Args:
        x: [T, K] with a gate, else [T, k, K]; contiguous.
        stack: of gate and up of each expert with a gate, else of one matrix each.
        bias: [E, 2N] or [E, N], or None.
        routing: of the tokens; without tiles each program takes one entry.
        gate: of the products; None: multiply by the routing's weights.
        is_after_gated: the previous kernel made x, and the routing is older.

    Returns:
        [T, k, N] with a gate, else [k, T, N].
    """
    num_tokens, top_k = routing.experts.shape
    pair = (top_k, num_tokens) if gate is None else (num_tokens, top_k)
    out = torch.empty(*pair, stack.num_rows, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    native = is_native(stack, x)
    codes = stack.codes
    if stack.kind == "e4m3" and not native:
        codes = codes.view(torch.uint8)
    offset = stack.scale if stack.offset is None else stack.offset
    fixed = stack.inputs if isinstance(stack.inputs, float) else 0.0
    common = (x, codes, stack.scale, offset, fixed, bias, routing.weights, out)
    height = routing.tile or ENTRY_ROWS
    block_n = BLOCK_N if routing.tile else ENTRY_BLOCK_N
    sizes = (
        num_tokens, stack.num_matrices * stack.padded_rows, stack.num_rows, stack.padded_rows,
        stack.num_columns, top_k, *constants(gate), height, block_n, STAGES,
        *stack.constants, native, x.is_cuda,
    )  # fmt: skip
    tiles_n = cdiv(stack.num_rows, block_n)
    options = {"num_warps": 8 if height >= WIDE_TILE else 4, **dependent_launch(x)}
    if not routing.tile:
        entry_codes_kernel[(num_tokens * top_k * tiles_n,)](
            *common, routing.experts, *sizes, **options
        )
    elif routing.slots is not None:
        slots_codes_kernel[(routing.slots.shape[0] * tiles_n,)](
            *common, routing.slots, *sizes, next_power_of_2(num_tokens), is_after_gated, **options
        )
    else:
        assert routing.tile_experts is not None
        sorted_codes_kernel[(routing.tile_experts.shape[0] * tiles_n,)](
            *common, routing.places, routing.tile_experts, *sizes, **options
        )
    return out


def is_native(stack: CodeStack, x: torch.Tensor) -> bool:
    """Whether the tensor cores multiply the codes of x by those of the stack."""
    if stack.kind == "int8":
        return True
    return stack.kind == "e4m3" and stack.inputs is not None and (not x.is_cuda or converts_fp8(x))
