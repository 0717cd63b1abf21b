"""The arguments of a sampler: plain tensors, and a host flag for what no row uses.

Owns the types. Never draws: `nv_kernels.sampling.draw` defines the draw, `sampling.controls`
what happens before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters of R rows, each [R] on the logits' device.

    Attributes:
        temperature: fp32; 0 is greedy.
        top_k: int32; 0 is off, more than V keeps all.
        top_p: fp32 in (0, 1]; 1 is off.
        min_p: fp32 in [0, 1]; 0 is off.
        seeds: int64 key of the draw, all 64 bits used.
        positions: int64 position of the token to be drawn, low 32 bits used.
        any_filter: host flag; False if top_k, top_p and min_p are off in every row.
        num_ids: host number; ids from num_ids on are never drawn, whatever their logits. None: all
            V ids may be drawn.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    any_filter: bool
    num_ids: int | None = None


@dataclass(frozen=True)
class LogitControls:
    """The controls of R rows of logits, which change them before the draw.

    A table has one row per slot. It may be short: its last row, which is neutral, then serves all
    slots from there on. A table is None if no row of the step uses its control.

    Attributes:
        slots: [R] int64, the row of each table that a row of logits uses.
        lengths: [R] int64 tokens of each row so far.
        masks: [N, ceil(V / 32)] int32, one bit per token: set where a grammar allows it.
        allowed: [N, V] bool.
        words: [N, K, L] int64 forbidden words, last token first, -1 after a word's first token;
            all -1: not a word.
        recent: [N, W] int64 drawn tokens, newest first, -1 after the oldest; W >= L - 1.
        stop_ids: [N, K] int64 tokens that are forbidden below a length.
        min_lengths: [N] int64, that length.
        bias_ids: [N, K] int64 tokens, none twice in a row; -1 where a row has fewer.
        bias_values: [N, K] fp32.
        repetition: [N] fp32 penalty, 1 is off.
        additive: [N, 2] fp32 frequency and presence penalties, 0 is off.
        counts: [N, V] int32, twice a token's draws, plus 1 if it is in the prompt.
    """

    slots: torch.Tensor
    lengths: torch.Tensor
    masks: torch.Tensor | None = None
    allowed: torch.Tensor | None = None
    words: torch.Tensor | None = None
    recent: torch.Tensor | None = None
    stop_ids: torch.Tensor | None = None
    min_lengths: torch.Tensor | None = None
    bias_ids: torch.Tensor | None = None
    bias_values: torch.Tensor | None = None
    repetition: torch.Tensor | None = None
    additive: torch.Tensor | None = None
    counts: torch.Tensor | None = None
