"""Tokens times a weight on the tensor cores, in Triton's pipelined loop, with split-K partials.

x must be normalised already: an RMS norm inside the loop would send x through registers and cost
two to four times the time. The next, elementwise kernel sums the partials: this needs
neither atomics nor zeroing, and the result is the same every time. `tuned` decides when to use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv
from nv_kernels.linear.triton.adapter_tiles import (
    add_adapters,
    fetch_b,
    rows_of_a,
    store_hidden,
)

if TYPE_CHECKING:
    from nv_kernels.linear.lora.plan import LoraPlan
    from nv_kernels.linear.lora.weight import LoraWeights
    from nv_kernels.linear.tuned import Dot

ADAPTER_COLUMNS = 64  # of the adapters' B, per iteration

gdc_launch = tl.extra.cuda.gdc_launch_dependents
gdc_wait = tl.extra.cuda.gdc_wait


@triton.jit
def _fetch_to_l2(pointers):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "a_tiles"])
def dot_kernel(
    x, weight, out, hidden, lora_a, lora_b, adapters, present, ready, M, N, a_tiles, a_stride,
    b_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, SWAP: tl.constexpr,
    EVEN: tl.constexpr, TRIGGER: tl.constexpr, PREFETCH: tl.constexpr, RANK: tl.constexpr,
    PARTS: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Compute a [BLOCK_M, BLOCK_N] tile over K / SPLIT_K columns; N weight rows in all.

    GATED: the tile holds blocks of 32 gate rows and the 32 up rows that belong to them. RANK: there
    are adapters, and the first a_tiles tiles are of their A.
    """
    if TRIGGER == 1:
        gdc_launch()
    tile = tl.program_id(1)
    part = tl.program_id(2)
    if RANK:  # the tiles of A come first, with all their parts
        part = tile % SPLIT_K
        tile = tile // SPLIT_K - a_tiles
        HEIGHT: tl.constexpr = PARTS * RANK
        num_a = tl.cdiv(tl.load(present) * HEIGHT, BLOCK_N)
        if tile < 0 and tile + a_tiles >= num_a:
            return  # the others wait for the previous kernel
    COLUMNS: tl.constexpr = K // SPLIT_K
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        at = tl.arange(0, BLOCK_N)
        feature = tile * (BLOCK_N // 2) + (at // 64) * 32 + at % 32
        rows = feature + ((at // 32) % 2) * (N // 2)
    elif EVEN:
        rows = outputs
    else:
        rows = tl.minimum(outputs, N - 1)
    first = part * COLUMNS
    lines = weight + rows[:, None].to(tl.int64) * K + first
    if RANK:
        adapter, row = rows_of_a(present, tile + a_tiles, BLOCK_N, HEIGHT)
        own_lines = lora_a + tl.maximum(adapter, 0)[:, None] * a_stride
        own_lines += row[:, None].to(tl.int64) * K + first
        lines = tl.where(tile < 0, own_lines, lines)
        if TRIGGER > 0 and tile >= 0:
            fetch_b(lora_b, present, rows, part, b_stride, RANK, SPLIT_K, BLOCK_S)
    if PREFETCH:
        WIDTH: tl.constexpr = (COLUMNS // 64) & (-(COLUMNS // 64))
        for step in tl.static_range(COLUMNS // 64 // WIDTH):
            _fetch_to_l2(lines + (step * WIDTH + tl.arange(0, WIDTH))[None, :] * 64)
    columns = tl.arange(0, BLOCK_K)
    weight_at = lines + columns[None, :]
    # Rows past the last read real rows, each another one: a single row would be a hot spot.
    x_at = x + (tokens % M)[:, None] * K + first + columns[None, :]
    if TRIGGER > 0:
        gdc_wait()
        if TRIGGER == 2:
            gdc_launch()
    if SWAP:
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, COLUMNS, BLOCK_K, num_stages=STAGES):
        w = tl.load(weight_at + k, eviction_policy="evict_first")
        values = tl.load(x_at + k)
        if SWAP:
            sums = tl.dot(w, tl.trans(values), sums)
        else:
            sums = tl.dot(values, tl.trans(w), sums)
    if TRIGGER == 3:
        gdc_launch()
    if RANK:
        if tile < 0:
            store_hidden(sums, hidden, adapters, ready, tokens, adapter, row, M, part, HEIGHT, SWAP)
            return
        SIDES: tl.constexpr = 2 if GATED else 1
        sides = ((tl.arange(0, BLOCK_N) // 32) % 2) * GATED
        own_part = 0
        if not GATED:
            own_part = (tile * BLOCK_N >= N0).to(tl.int32) + (tile * BLOCK_N >= N1).to(tl.int32)
        num_programs = tl.num_programs(0) * (tl.num_programs(1) - a_tiles * SPLIT_K)
        sums = add_adapters(
            sums, hidden, lora_b, adapters, present, ready, tokens, rows, sides, own_part, part, M,
            num_a * SPLIT_K * tl.num_programs(0), num_programs, b_stride,
            RANK, SIDES, HEIGHT, SPLIT_K, BLOCK_S, BLOCK_W, SWAP,
        )  # fmt: skip
    if SWAP:
        sums = tl.trans(sums)
    dtype: tl.constexpr = out.dtype.element_ty
    if GATED:
        pairs = tl.permute(tl.reshape(sums, (BLOCK_M, BLOCK_N // 64, 2, 32)), (0, 1, 3, 2))
        gate, up = tl.split(pairs)
        y = tl.reshape(gate * tl.sigmoid(gate) * up, (BLOCK_M, BLOCK_N // 2))
        features = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        place = tokens[:, None] * (N // 2) + features[None, :]
        tl.store(out + place, y.to(dtype), mask=(tokens < M)[:, None])
    else:
        place = (part * M + tokens[:, None]).to(tl.int64) * N + outputs[None, :]
        mask = (tokens < M)[:, None] & (outputs < N)[None, :]
        tl.store(out + place, sums.to(dtype), mask=mask)


def dot(
    form: Dot,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    gated: bool = False,
    dtype: torch.dtype | None = None,
    adapters: tuple[LoraWeights, LoraPlan] | None = None,
) -> torch.Tensor:
    """Multiply tokens by a weight.

    Args:
        form: the settings; split_k * block_k divides K; block_n divides N where gated.
        x: [T, K].
        weight: [N, K], or [2F, K] (gate rows, then up rows) where gated.
        gated: return silu(gate) * up, [T, F].
        dtype: of the result, x's by default; partials ignore it.
        adapters: whose products are added, before the gate; None: none. They are in x's dtype,
            and block_n divides the rows of each part.

    Returns:
        [T, N] or [T, F]; [P, T, N] partials if the form splits K.
    """
    tokens, columns = x.shape
    rows = weight.shape[0]
    if form.split_k > 1:
        dtype = x.dtype if form.narrow else torch.float32
        out = torch.empty(form.split_k, tokens, rows, dtype=dtype, device=x.device)
    else:
        outputs = rows // 2 if gated else rows
        out = torch.empty(tokens, outputs, dtype=dtype or x.dtype, device=x.device)
    options = dependent_launch(x)
    trigger = form.trigger if options["PDL"] else 0
    token_tiles, tiles = cdiv(tokens, form.block_m), cdiv(rows, form.block_n)
    settings = form.block_m, form.block_n, form.block_k, form.split_k, form.stages, gated
    flags = form.swap, rows % form.block_n == 0, trigger, form.prefetch and trigger > 0
    launch = {"num_warps": form.warps} | ({"launch_pdl": True} if trigger else {})
    if adapters is None:
        dot_kernel[(token_tiles, tiles, form.split_k)](
            x, weight, out, *[x] * 6, tokens, rows, 0, 0, 0, columns, *settings, *flags,
            0, 0, 0, 0, 0, 0, **launch,
        )  # fmt: skip
        return out
    (a, b, part_rows), plan = adapters
    slots, height, rank = *a.shape[:2], b.shape[2]
    hidden = torch.empty(form.split_k, tokens, height, dtype=torch.float32, device=x.device)
    a_tiles = cdiv(min(slots, tokens) * height, form.block_n)
    block_w = min(rank * (2 if gated else 1), ADAPTER_COLUMNS)
    dot_kernel[(token_tiles, (a_tiles + tiles) * form.split_k, 1)](
        x, weight, out, hidden, a, b, plan.adapters, plan.present, plan.ready, tokens, rows,
        a_tiles, a.stride(0), b.stride(0), columns, *settings, *flags,
        rank, len(part_rows), part_rows[0], sum(part_rows[:2]), ADAPTER_COLUMNS // block_w, block_w,
        **launch,
    )  # fmt: skip
    return out
