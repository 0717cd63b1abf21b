"""The controls of all rows in one pass over the logits, and a short one for single tokens.

Every control except the bias writes -inf or changes every token, and -inf stays -inf after the
other controls. So the dense controls (masks, penalties) run first, in the pass that converts the
logits to fp32. Then one program per row computes the tokens with a bias again from the raw logits,
and forbids stop ids and words.

A row reads only tables in which its slot has a row; its result has the definition's bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.launch.sizes import cdiv
from nv_kernels.launch.triton_previous import wait_for_previous

if TYPE_CHECKING:
    from nv_kernels.sampling.parameters import LogitControls

NONE = tl.constexpr(-float("inf"))
CHUNK = 2048  # tokens per program of the dense pass
BLOCK = 128  # tokens or words that a program of the sparse pass reads at once
SIZES = [
    "V", "mask_width", "last_mask", "last_allowed", "last_penalty",
    "num_biases", "last_bias", "num_words", "word_length", "last_words", "num_recent",
    "num_stops", "last_stops", "length_stride",
]  # fmt: skip


@triton.jit
def _shaped(
    x, ids, inside, slot, bias,
    masks, allowed, repetition, additive, counts,
    V, mask_width, last_mask, last_allowed, last_penalty, BIASED: tl.constexpr,
):  # fmt: skip
    """Return logits x of the tokens ids after a slot's masks, a bias and its penalties."""
    if slot < last_mask:
        word = tl.load(masks + slot * mask_width + (ids >> 5), mask=inside, other=0)
        x = tl.where(((word >> (ids & 31).to(tl.int32)) & 1) != 0, x, NONE)
    if slot < last_allowed:
        x = tl.where(tl.load(allowed + slot * V + ids, mask=inside, other=0) != 0, x, NONE)
    if BIASED:
        x += bias
    if slot < last_penalty:
        factor = tl.load(repetition + slot)
        frequency = tl.load(additive + slot * 2)
        presence = tl.load(additive + slot * 2 + 1)
        if (factor != 1) | (frequency != 0) | (presence != 0):
            count = tl.load(counts + slot * V + ids, mask=inside, other=0)
            drawn = count >> 1
            scaled = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + factor), x * factor)
            x = tl.where(count > 0, scaled, x)
            x -= frequency * drawn.to(tl.float32)
            x -= presence * (drawn > 0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=[name for name in SIZES if name != "V"])
def shape_kernel(
    logits, shaped, slots, masks, allowed, repetition, additive, counts,
    stride, V, mask_width, last_mask, last_allowed, last_penalty,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Convert a chunk of a row to fp32, mask it and penalize it."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = ids < V
    x = tl.load(logits + row * stride + ids, mask=inside, other=0.0).to(tl.float32)
    x = _shaped(
        x, ids, inside, tl.load(slots + row), 0.0, masks, allowed, repetition, additive, counts,
        V, mask_width, last_mask, last_allowed, last_penalty, False,
    )  # fmt: skip
    tl.store(shaped + row * V + ids, x, mask=inside)


@triton.jit(do_not_specialize=["stride", *SIZES])
def edit_kernel(
    logits, shaped, slots, lengths, masks, allowed, repetition, additive, counts,
    bias_ids, bias_values, words, recent, stop_ids, min_lengths,
    stride, V, mask_width, last_mask, last_allowed, last_penalty,
    num_biases, last_bias, num_words, word_length, last_words, num_recent,
    num_stops, last_stops, length_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Change the tokens of a row that its slot lists one by one."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    line = shaped + row * V
    at = tl.arange(0, BLOCK)
    if slot < last_bias:
        for start in range(0, num_biases, BLOCK):
            place = slot * num_biases + start + at
            ids = tl.load(bias_ids + place, mask=start + at < num_biases, other=-1)
            named = ids >= 0
            bias = tl.load(bias_values + place, mask=named, other=0.0)
            x = tl.load(logits + row * stride + ids, mask=named, other=0.0).to(tl.float32)
            x = _shaped(
                x, ids, named, slot, bias, masks, allowed, repetition, additive, counts,
                V, mask_width, last_mask, last_allowed, last_penalty, True,
            )  # fmt: skip
            tl.store(line + ids, x, mask=named)
        tl.debug_barrier()  # another thread may forbid a token with a bias below
    if slot < last_stops:
        short = tl.load(lengths + row) < tl.load(min_lengths + slot * length_stride)
        for start in range(0, num_stops, BLOCK):
            inside = (start + at < num_stops) & short
            ids = tl.load(stop_ids + slot * num_stops + start + at, mask=inside, other=0)
            tl.store(line + ids, tl.full((BLOCK,), NONE, tl.float32), mask=inside)
    if slot < last_words:
        for start in range(0, num_words, BLOCK):
            inside = start + at < num_words
            word = words + (slot * num_words + start + at) * word_length
            last = tl.load(word, mask=inside, other=-1)
            fits = last >= 0
            for index in range(1, word_length):
                token = tl.load(word + index, mask=inside, other=-1)
                drawn = tl.load(recent + slot * num_recent + index - 1)
                fits = fits & ((token == drawn) | (token < 0))
            tl.store(line + last, tl.full((BLOCK,), NONE, tl.float32), mask=fits)


def shape_logits(logits: torch.Tensor, controls: LogitControls) -> torch.Tensor:
    """Apply to each row the controls of its slot.

    Args:
        logits: [R, V] fp32, bf16 or fp16; they are not changed.
        controls: the rows' slots, and the tables of the controls that some row uses.

    Returns:
        [R, V] fp32. A row without controls has its logits' values.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocabulary = logits.shape
    shaped = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
    if not rows:
        return shaped
    c, slots = controls, controls.slots.contiguous()
    masks, last_mask = _table(c.masks, torch.int32, slots)
    allowed = None if c.allowed is None else c.allowed.view(torch.uint8)
    allowed, last_allowed = _table(allowed, torch.uint8, slots)
    counts, last_penalty = _table(c.counts, torch.int32, slots)
    repetition, _ = _table(c.repetition, torch.float32, slots)
    additive, _ = _table(c.additive, torch.float32, slots)
    dense = (masks, allowed, repetition, additive, counts)
    sizes = (
        logits.stride(0), vocabulary, masks.shape[-1], last_mask, last_allowed, last_penalty,
    )  # fmt: skip
    # No fused multiply-add: product and difference are rounded one by one, as in the definition.
    options = {**dependent_launch(logits), "enable_fp_fusion": False}
    shape_kernel[(rows, cdiv(vocabulary, CHUNK))](
        logits, shaped, slots, *dense, *sizes, CHUNK, num_warps=4, **options
    )
    if c.bias_ids is None and c.words is None and c.stop_ids is None:
        return shaped
    bias_ids, last_bias = _table(c.bias_ids, torch.int64, slots)
    bias_values, _ = _table(c.bias_values, torch.float32, slots)
    words, last_words = _table(c.words, torch.int64, slots)
    recent, _ = _table(c.recent, torch.int64, slots)
    stop_ids, last_stops = _table(c.stop_ids, torch.int64, slots)
    min_lengths, _ = _table(c.min_lengths, torch.int64, slots)
    num_words, word_length = words.shape[-2:] if c.words is not None else (0, 1)
    edit_kernel[(rows,)](
        logits, shaped, slots, c.lengths.contiguous(), *dense,
        bias_ids, bias_values, words, recent, stop_ids, min_lengths, *sizes,
        bias_ids.shape[-1], last_bias, num_words, word_length, last_words, recent.shape[-1],
        stop_ids.shape[-1], last_stops, min_lengths.stride(0),
        BLOCK, num_warps=1, **options,
    )  # fmt: skip
    return shaped


def _table(
    table: torch.Tensor | None, dtype: torch.dtype, slots: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Return a table and its number of slots; for None a pointer that is never read, and 0."""
    return (slots.view(dtype), 0) if table is None else (table, len(table) - 1)
