"""Codes of tokens times codes of a weight, on the tensor cores of 8 bits: e4m3 or integers.

Runs on cards with units for the codes, and in the interpreter, for every number of tokens. With few
tokens the weight rows are on the tensor cores' long side. Hopper adds e4m3 products in about 14
bits, so every 128 columns the sum is added in fp32; integers are added exactly. Scales of rows and
tokens come last, scales of blocks every 128 columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv
from nv_kernels.linear.triton.result import empty_result

if TYPE_CHECKING:
    import torch

    from nv_kernels.linear.quantized.tuned import Tile

gdc_launch = tl.extra.cuda.gdc_launch_dependents
gdc_wait = tl.extra.cuda.gdc_wait
BLOCK = 128  # columns per scale of a block; also columns that e4m3 products may be added for


@triton.jit
def _fetch_to_l2(pointers):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _fetch_lines(lines, COLUMNS: tl.constexpr):
    """Fetch COLUMNS bytes from each address on, 128 at a time; a rest below 128 is left out."""
    WIDTH: tl.constexpr = (COLUMNS // 128) & (-(COLUMNS // 128))
    if WIDTH > 0:
        for step in tl.static_range(COLUMNS // 128 // WIDTH):
            _fetch_to_l2(lines + (step * WIDTH + tl.arange(0, WIDTH))[None, :] * 128)


@triton.jit
def _part(
    x_at, w_at, x_scale_at, w_scale_at, M, start, end,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, SWAP: tl.constexpr, X_BLOCKS: tl.constexpr, W_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sum columns start to end, scaled: fp32 [BLOCK_M, BLOCK_N].

    X_BLOCKS, W_BLOCKS: the scales are of blocks, so each block's product is scaled.
    """
    IS_INT: tl.constexpr = x_at.dtype.element_ty == tl.int8
    dtype: tl.constexpr = tl.int32 if IS_INT else tl.float32
    columns = tl.arange(0, BLOCK_K)
    if SWAP:
        sums = tl.zeros((BLOCK_N, BLOCK_M), dtype)
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype)
    for k in tl.range(start, end, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            w = tl.load(w_at + k)
            x = tl.load(x_at + k)
        else:
            w = tl.load(w_at + k, mask=(k + columns < K)[None, :], other=0.0)
            x = tl.load(x_at + k, mask=(k + columns < K)[None, :], other=0.0)
        if SWAP:
            left = w
            right = tl.trans(x)
        else:
            left = x
            right = tl.trans(w)
        if IS_INT:
            sums = tl.dot(left, right, sums, out_dtype=tl.int32)
        elif X_BLOCKS or W_BLOCKS:
            product = tl.dot(left, right)
            if X_BLOCKS:
                x_scale = tl.load(x_scale_at + k // 128 * M)
                product *= x_scale[None, :] if SWAP else x_scale[:, None]
            if W_BLOCKS:
                w_scale = tl.load(w_scale_at + k // 128)
                product *= w_scale[:, None] if SWAP else w_scale[None, :]
            sums += product
        else:
            sums = tl.dot(left, right, sums, max_num_imprecise_acc=128)
    sums = sums.to(tl.float32)
    if SWAP:
        sums = tl.trans(sums)
    if not X_BLOCKS:
        sums *= tl.load(x_scale_at)[:, None]
    if not W_BLOCKS:
        sums *= tl.load(w_scale_at)[None, :]
    return sums


@triton.jit(do_not_specialize=["M"])
def codes_kernel(
    x, x_scale, weight, w_scale, bias, out, M, N,
    K: tl.constexpr, COLUMNS: tl.constexpr, PARTS_EACH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
    STAGES: tl.constexpr, SWAP: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    X_GROUPS: tl.constexpr, W_BLOCKS: tl.constexpr, PREFETCH: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """Compute a [BLOCK_M, BLOCK_N] tile over PARTS_EACH parts of COLUMNS columns each.

    x [M, K], weight [N, K]; x_scale [X_GROUPS, M]; w_scale [N], or of blocks if W_BLOCKS. GATED:
    blocks of 32 gate rows and the 32 up rows that belong to them. BAND tiles of tokens use the same
    rows at the same time. TRIGGER: when the next kernel may start; see `tuned.Slab`.
    """
    if TRIGGER == 1:
        gdc_launch()
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    band = tile // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    inside = tile % (BAND * tiles_n)
    tokens = (band * BAND + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile_n = inside // height
    at = tl.arange(0, BLOCK_N)
    outputs = tile_n * BLOCK_N + at
    if GATED:
        rows = tile_n * (BLOCK_N // 2) + at // 64 * 32 + at % 32 + at // 32 % 2 * (N // 2)
    else:
        rows = tl.minimum(outputs, N - 1)
    first = tl.program_id(1) * PARTS_EACH
    lines = weight + rows[:, None].to(tl.int64) * K
    if PREFETCH:
        _fetch_lines(lines + first * COLUMNS, COLUMNS)
    columns = tl.arange(0, BLOCK_K)[None, :]
    # Rows past the last read real rows, each another one: a single row would be a hot spot.
    members = tokens % M
    x_at = x + members.to(tl.int64)[:, None] * K + columns
    w_at = lines + columns
    x_scale_at = x_scale + members
    if W_BLOCKS:
        w_scale_at = w_scale + rows // 128 * ((K + 127) // 128)
    else:
        w_scale_at = w_scale + rows
    if TRIGGER > 0:
        gdc_wait()
        if TRIGGER == 2:
            gdc_launch()
    X_BLOCKS: tl.constexpr = X_GROUPS > 1
    if PARTS_EACH == 1:
        start = first * COLUMNS
        sums = _part(
            x_at, w_at, x_scale_at, w_scale_at, M, start, tl.minimum(start + COLUMNS, K), K,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, SWAP, X_BLOCKS, W_BLOCKS,
        )  # fmt: skip
    else:
        sums = _part(
            x_at, w_at, x_scale_at, w_scale_at, M, 0, COLUMNS, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            SWAP, X_BLOCKS, W_BLOCKS,
        )  # fmt: skip
        for part in range(1, PARTS_EACH):
            start = part * COLUMNS
            sums += _part(
                x_at, w_at, x_scale_at, w_scale_at, M, start, tl.minimum(start + COLUMNS, K), K,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES, SWAP, X_BLOCKS, W_BLOCKS,
            )  # fmt: skip
    if TRIGGER == 3:
        gdc_launch()
    dtype: tl.constexpr = out.dtype.element_ty
    if GATED:
        pairs = tl.permute(tl.reshape(sums, (BLOCK_M, BLOCK_N // 64, 2, 32)), (0, 1, 3, 2))
        gate, up = tl.split(pairs)
        y = tl.reshape(gate * tl.sigmoid(gate) * up, (BLOCK_M, BLOCK_N // 2))
        features = tile_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        place = tokens[:, None].to(tl.int64) * (N // 2) + features[None, :]
        mask = (tokens < M)[:, None] & (features < N // 2)[None, :]
        tl.store(out + place, y.to(dtype), mask=mask)
    else:
        if BIAS:
            sums += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
        place = (tl.program_id(1) * tl.cast(M, tl.int64) + tokens[:, None]) * N + outputs[None, :]
        mask = (tokens < M)[:, None] & (outputs < N)[None, :]
        tl.store(out + place, sums.to(dtype), mask=mask)


def codes_product(
    form: Tile,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    dtype: torch.dtype,
    gated: bool = False,
    bias: torch.Tensor | None = None,
    spread: bool = True,
    same_sums: bool = False,
) -> torch.Tensor:
    """Multiply codes of tokens by codes of a weight.

    Args:
        form: the settings; block_k is 128 if there are scales of blocks.
        x: [T, K] e4m3 or int8.
        x_scale: fp32 [T, 1], or [T, ceil(K / 128)] of blocks, tokens side by side.
        weight: [N, K] in x's dtype, or [2F, K] (gate rows, then up rows) where gated; then 32
            divides F.
        w_scale: fp32 [N], or [ceil(N / 128), ceil(K / 128)] of blocks.
        dtype: of the result; partials are fp32.
        gated: return silu(gate) * up, [T, F]; split_k is ignored.
        bias: [N] or None; not with partials.
        spread: a program per part of K, whose partials are returned; else a program sums all.
        same_sums: bitwise the same sums whether they are spread or not.

    Returns:
        [T, N] or [T, F]; [P, T, N] partials if the form splits K and they are spread.
    """
    (tokens, columns), rows = x.shape, weight.shape[0]
    share = cdiv(cdiv(columns, BLOCK), 1 if gated else form.split_k) * BLOCK
    parts = cdiv(columns, share)  # no part is empty
    programs = parts if spread else 1
    outputs = rows // 2 if gated else rows
    out = empty_result(programs, tokens, outputs, dtype, x.device)
    if tokens:
        options = dependent_launch(x)
        trigger = form.trigger if options["PDL"] else 0
        grid = (cdiv(tokens, form.block_m) * cdiv(rows, form.block_n), programs)
        codes_kernel[grid](
            x, x_scale, weight, w_scale, x if bias is None else bias, out, tokens, rows,
            columns, share, parts // programs, form.block_m, form.block_n, BLOCK, form.band,
            form.stages, form.swap, gated, bias is not None, x_scale.shape[1], w_scale.dim() == 2,
            form.prefetch and trigger > 0, trigger,
            num_warps=form.warps, enable_fp_fusion=not same_sums,
            **({"launch_pdl": True} if trigger else {}),
        )  # fmt: skip
    return out
