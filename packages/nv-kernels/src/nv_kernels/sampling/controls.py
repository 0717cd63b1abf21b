"""The controls that requests can apply to their logits before the draw.

Owns the definition of each control and their order, which is vLLM's: a grammar's mask, allowed
tokens, bad words, min_tokens, bias, then penalties; temperature and the filters follow in `sample`.
Shapes are fixed, nothing is read back to the host, and rows without a control keep their values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nv_kernels.op import op

if TYPE_CHECKING:
    from nv_kernels.sampling.parameters import LogitControls

MAX_PART = 2**24  # logits per pass of a control: its temporaries take 64 MiB
ANY = -1  # in a table of words: a place without a token, which matches every token


@op(triton="nv_kernels.sampling.triton_controls")
def shape_logits(logits: torch.Tensor, controls: LogitControls) -> torch.Tensor:
    """Apply to each row the controls of its slot.

    Args:
        logits: [R, V] fp32, bf16 or fp16; they are not changed.
        controls: the rows' slots, and the tables of the controls that some row uses.

    Returns:
        [R, V] fp32. A row without controls has its logits' values.
    """
    shaped = logits.to(torch.float32, copy=True)
    step = max(1, MAX_PART // logits.shape[1])
    for start in range(0, logits.shape[0], step):
        part = slice(start, start + step)
        _shape(shaped[part], controls, controls.slots[part], controls.lengths[part])
    return shaped


def _shape(
    logits: torch.Tensor, controls: LogitControls, slots: torch.Tensor, lengths: torch.Tensor
) -> None:
    if controls.masks is not None:
        allow_bits(logits, _rows(controls.masks, slots))
    if controls.allowed is not None:
        allow_only(logits, _rows(controls.allowed, slots))
    if controls.words is not None:
        assert controls.recent is not None
        forbid_words(logits, _rows(controls.words, slots), _rows(controls.recent, slots))
    if controls.stop_ids is not None:
        assert controls.min_lengths is not None
        short = lengths < _rows(controls.min_lengths, slots)
        forbid(logits, _rows(controls.stop_ids, slots), short[:, None])
    if controls.bias_ids is not None:
        assert controls.bias_values is not None
        add_bias(logits, _rows(controls.bias_ids, slots), _rows(controls.bias_values, slots))
    if controls.counts is not None:
        assert controls.repetition is not None
        assert controls.additive is not None
        repetition, additive = _rows(controls.repetition, slots), _rows(controls.additive, slots)
        penalize(logits, _rows(controls.counts, slots), repetition, additive)


def _rows(table: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Look up slots in a table whose last row serves all slots from there on."""
    return table[slots.clamp(max=len(table) - 1)]


def allow_only(logits: torch.Tensor, allowed: torch.Tensor) -> None:
    """Write -inf for every token that is not allowed.

    Args:
        logits: [R, V] fp32, changed in place.
        allowed: [R, V] bool.
    """
    logits.masked_fill_(~allowed, -torch.inf)


def allow_bits(logits: torch.Tensor, bits: torch.Tensor) -> None:
    """Write -inf for every token whose bit is not set.

    Args:
        logits: [R, V] fp32, changed in place.
        bits: [R, ceil(V / 32)] int32; token t is bit t % 32 of word t // 32.
    """
    num_rows, vocab_size = logits.shape
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = (bits[:, :, None] >> places) & 1  # [R, W, 32]
    allow_only(logits, allowed.view(num_rows, -1)[:, :vocab_size].bool())


def forbid(logits: torch.Tensor, ids: torch.Tensor, applies: torch.Tensor) -> None:
    """Write -inf for the tokens `ids` where `applies`; a row may contain an id several times.

    Args:
        logits: [R, V] fp32, changed in place.
        ids: [R, K] int64.
        applies: bool, [R, K] or anything that expands to it.
    """
    most = torch.where(applies.expand_as(ids), -torch.inf, torch.inf)
    logits.scatter_reduce_(1, ids, most, "amin")


def forbid_words(logits: torch.Tensor, words: torch.Tensor, recent: torch.Tensor) -> None:
    """Write -inf for the last token of each word whose other tokens are the newest drawn ones.

    Only drawn tokens count, not the prompt's (as in vLLM).

    Args:
        logits: [R, V] fp32, changed in place.
        words: [R, K, L] int64, last token first, ANY after the word's first token; all ANY: not a
            word.
        recent: [R, W] int64 drawn tokens, newest first, ANY after the oldest; W >= L - 1.
    """
    before = words[:, :, 1:]
    fits = ((before == recent[:, None, : before.shape[2]]) | (before == ANY)).all(-1)  # [R, K]
    last = words[:, :, 0]
    forbid(logits, last.clamp(min=0), fits & (last != ANY))


def add_bias(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Add to the logits of some tokens.

    Args:
        logits: [R, V] fp32, changed in place.
        ids: [R, K] int64, none twice in a row; ANY where the row has fewer.
        values: [R, K] fp32; 0 where the row has fewer.
    """
    logits.scatter_add_(1, ids.clamp(min=0), values)


def penalize(
    logits: torch.Tensor, counts: torch.Tensor, repetition: torch.Tensor, additive: torch.Tensor
) -> None:
    """Make tokens that occurred less likely, or more likely (penalties below 1 or below 0).

    Repetition (Keskar et al., CTRL, 2019) divides positive logits and multiplies negative ones, of
    the prompt's tokens and of the drawn ones; frequency times the number of draws, and presence
    once, are taken from drawn ones alone (the OpenAI API's definition).

    Args:
        logits: [R, V] fp32, changed in place.
        counts: [R, V] int32, twice the number of draws, plus 1 for the prompt's tokens.
        repetition: [R] fp32, 1 is off.
        additive: [R, 2] fp32 frequency and presence penalties, 0 is off.
    """
    factor = repetition[:, None]
    scaled = torch.where(logits > 0, logits / factor, logits * factor)
    torch.where(counts > 0, scaled, logits, out=logits)
    drawn = counts >> 1
    logits -= additive[:, :1] * drawn
    logits -= additive[:, 1:] * (drawn > 0)
