"""Controls: which of them a request, or a step, asks for.

Owns the names. What each does, and in which order, `nk.reference.shape_logits` defines; what they
need on the device is in control_tables.
"""

from typing import NamedTuple

ANY = -1
"""In a table of words: no token here, so that every token fits."""


class ControlFlags(NamedTuple):
    """Which controls a row, or some row of a step, asks for."""

    allowed: bool = False
    words: bool = False
    bias: bool = False
    penalties: bool = False
    grammar: bool = False
    past: bool = False
    """Ids past the tokenizer's may be drawn: the row names some."""


NO_CONTROLS = ControlFlags()
