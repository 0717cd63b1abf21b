"""SamplingFlags: which parts of the draw the rows of one step need, and which controls.

Owns the records, which the host fills and which are part of a graph's key. Never holds a tensor.
What each control does, and in which order, `nk.reference.shape_logits` defines.
"""

from typing import NamedTuple

from nv_kernels import SamplingTensors, StepRows

MANY_LOGPROBS = 128
"""If a row asks for more of them, no graph keeps room for them."""


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


class SamplingFlags(NamedTuple):
    """The parts of the draw that some row of a step needs, known on the host."""

    any_filter: bool
    any_min_tokens: bool
    controls: ControlFlags = NO_CONTROLS
    num_ids: int | None = None
    """Ids from here on are not drawn, but by rows that name some."""
    num_logprobs: int | None = None
    """Most likely tokens to find for each row, a power of 2 or the vocabulary; None: none asks."""

    @property
    def many_logprobs(self) -> bool:
        """Whether a graph would hold on to much for what few steps ask."""
        return (self.num_logprobs or 0) > MANY_LOGPROBS

    def sampling(self, rows: StepRows) -> SamplingTensors:
        """The sampling parameters of those rows."""
        return SamplingTensors(
            temperature=rows.temperature,
            top_k=rows.top_k,
            top_p=rows.top_p,
            min_p=rows.min_p,
            seeds=rows.seeds,
            positions=rows.lengths,
            any_filter=self.any_filter,
            num_ids=self.num_ids,
        )
