"""Controls: what a request may ask to happen to its logits before the draw.

Owns the definition of each and their order, which is vLLM's: a grammar's mask, allowed tokens, bad
words, min_tokens, bias, then penalties; temperature and the filters follow in `nk.sample`. Never
keeps anything (control_tables does). A step changes fp32 logits in place, has fixed shapes, reads
nothing back, and leaves the rows that did not ask for it as they are, bit for bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

ANY = -1
"""In a table of words: no token here, so that every token fits."""


class ControlFlags(NamedTuple):
    """Which controls a row, or some row of a step, asks for."""

    allowed: bool = False
    words: bool = False
    bias: bool = False
    penalties: bool = False
    grammar: bool = False


NO_CONTROLS = ControlFlags()


def allow_only(logits_RV: Tensor, allowed_RV: Tensor) -> None:
    """-inf for every token that is not allowed.

    Args:
        logits_RV: fp32, changed in place.
        allowed_RV: bool.
    """
    logits_RV.masked_fill_(~allowed_RV, -torch.inf)


def allow_bits(logits_RV: Tensor, bits_RW: Tensor) -> None:
    """-inf for every token whose bit is not set.

    Args:
        logits_RV: fp32, changed in place.
        bits_RW: int32, W = ceil(V / 32); token t is bit t % 32 of word t // 32.
    """
    num_rows, vocab_size = logits_RV.shape
    places = torch.arange(32, dtype=torch.int32, device=bits_RW.device)
    allowed_RW32 = (bits_RW[:, :, None] >> places) & 1
    allow_only(logits_RV, allowed_RW32.view(num_rows, -1)[:, :vocab_size].bool())


def forbid(logits_RV: Tensor, ids_RK: Tensor, applies_RK: Tensor) -> None:
    """-inf for the tokens `ids_RK`, each where it applies; an id may stand in a row many times.

    Args:
        logits_RV: fp32, changed in place.
        ids_RK: int64 token ids.
        applies_RK: bool, or anything that expands to it.
    """
    most_RK = torch.where(applies_RK.expand_as(ids_RK), -torch.inf, torch.inf)
    logits_RV.scatter_reduce_(1, ids_RK, most_RK, "amin")


def forbid_words(logits_RV: Tensor, words_RKL: Tensor, recent_RW: Tensor) -> None:
    """-inf for the last token of each word whose other tokens were drawn just now.

    Only drawn tokens count, not the prompt's (as in vLLM).

    Args:
        logits_RV: fp32, changed in place.
        words_RKL: int64, last token first, ANY behind the word's first token; all ANY: no word.
        recent_RW: int64 drawn tokens, newest first, ANY behind the oldest; W is at least L - 1.
    """
    before_RKL = words_RKL[:, :, 1:]
    recent_R1L = recent_RW[:, None, : before_RKL.shape[2]]
    fits_RK = ((before_RKL == recent_R1L) | (before_RKL == ANY)).all(-1)
    last_RK = words_RKL[:, :, 0]
    forbid(logits_RV, last_RK.clamp(min=0), fits_RK & (last_RK != ANY))


def add_bias(logits_RV: Tensor, ids_RK: Tensor, values_RK: Tensor) -> None:
    """Add to the logits of some tokens.

    Args:
        logits_RV: fp32, changed in place.
        ids_RK: int64 token ids.
        values_RK: fp32; 0 where the row has fewer.
    """
    logits_RV.scatter_add_(1, ids_RK, values_RK)


def penalize(
    logits_RV: Tensor, counts_RV: Tensor, repetition_R: Tensor, additive_R2: Tensor
) -> None:
    """Make tokens that occurred less likely, or more (below 1, below 0).

    Repetition (Keskar et al., CTRL, 2019) divides positive logits and multiplies negative ones, of
    the prompt's tokens and of the drawn ones; frequency times the number of draws, and presence
    once, are taken from drawn ones alone (the OpenAI API's definition).

    Args:
        logits_RV: fp32, changed in place.
        counts_RV: int32, twice the number of draws, plus 1 for the prompt's tokens.
        repetition_R: fp32, 1 is off.
        additive_R2: fp32 frequency and presence penalties, 0 is off.
    """
    repetition_R1 = repetition_R[:, None]
    scaled_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    torch.where(counts_RV > 0, scaled_RV, logits_RV, out=logits_RV)
    drawn_RV = counts_RV >> 1
    logits_RV -= additive_R2[:, :1] * drawn_RV
    logits_RV -= additive_R2[:, 1:] * (drawn_RV > 0)
