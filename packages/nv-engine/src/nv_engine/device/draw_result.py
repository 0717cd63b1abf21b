"""DrawResult: what a batch drew, on its way from the device to plain values.

Owns the copies to the host and the wait for them. Never decides what is computed.
"""

from collections.abc import Mapping, Sequence
from math import isnan
from typing import NamedTuple

import torch
from torch import Tensor

from nv_engine.batch import NO_TOKEN, Chunk, StepResult, TokenLogprobs
from nv_engine.device.download import to_host
from nv_engine.device.head import Outputs
from nv_engine.device.logprobs import RowLogprobs, TopLogprobs, plain


class AskedLogprobs(NamedTuple):
    """The rows of a step whose log-probabilities are wanted, each in three columns."""

    rows: Sequence[int] = ()
    slots: Sequence[int] = ()
    counts: Sequence[int] = ()
    """Most likely tokens of each."""


class PromptResult(NamedTuple):
    """Log-probabilities of prompt tokens, sequence after sequence."""

    top: TopLogprobs
    spans: Sequence[tuple[int, int, int]]
    """Slot, number of tokens and num_logprobs of each sequence."""


def asked_logprobs(
    chunks: Sequence[Chunk], rows: Sequence[int], asked: Mapping[int, int]
) -> AskedLogprobs:
    """Find the sampling rows (`rows`, in the order of their chunks) whose slots ask."""
    slots = [chunk.slot for chunk in chunks if chunk.samples]
    places = [place for place, slot in enumerate(slots) if slot in asked]
    chosen = [slots[place] for place in places]
    return AskedLogprobs([rows[place] for place in places], chosen, [asked[s] for s in chosen])


class DrawResult:
    """A batch's results.

    Args:
        entries: of the ring, one for each step.
        rows: those of an entry that count.
        logprobs: what `sample` returned for the rows that ask, [num_steps, rows, ...] each.
        asked: the rows of those log-probabilities.
        prompt: of prompt tokens, [N, ...] each.
        silent: slots of the rows whose draw is not used: it only shows NaN or infinity.
        failed: as in StepResult.
    """

    def __init__(
        self,
        entries: Sequence[Tensor],
        rows: Sequence[int],
        logprobs: Outputs = (),
        asked: AskedLogprobs = AskedLogprobs(),  # noqa: B008  it never changes
        prompt: PromptResult | None = None,
        *,
        silent: Mapping[int, int] | None = None,
        failed: Mapping[int, str] | None = None,
    ) -> None:
        self._entries = entries
        self._rows = rows
        self._logprob_parts = [to_host(part) for part in logprobs]
        self._prompt_parts = [to_host(part) for part in prompt.top] if prompt else []
        self._asked = asked
        self._spans = prompt.spans if prompt is not None else ()
        self._silent = silent or {}
        self._failed = failed
        self._event: torch.cuda.Event | None = None
        if entries[0].is_pinned():
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def is_ready(self) -> bool:
        """Whether the step has ended."""
        event = self._event
        return event is None or bool(event.query())  # type: ignore[no-untyped-call]

    def result(self) -> StepResult:
        """Wait for the step and read what it drew."""
        if self._event is not None:
            self._event.synchronize()
        token_ids = [self._read(entry) for entry in self._entries]
        broken = [slot for row, slot in self._silent.items() if self._entries[0][row] == NO_TOKEN]
        if not self._asked.rows and not self._spans:
            return StepResult(token_ids, broken=broken, failed=self._failed)
        self._take_back(token_ids)
        prompt_logprobs = self._prompt_logprobs()
        for slot, tokens in (prompt_logprobs or {}).items():
            if any(isnan(token.logprobs[0]) for token in tokens):
                broken.append(slot)
        return StepResult(token_ids, self._logprobs(), prompt_logprobs, broken, self._failed)

    def _read(self, entry: Tensor) -> list[int]:
        last = self._rows[-1] + 1 if self._rows else 0
        values: list[int] = entry[:last].tolist()
        return values if last == len(self._rows) else [values[row] for row in self._rows]

    def _take_back(self, token_ids: list[list[int]]) -> None:
        """Let tokens whose log-probability is NaN be none.

        A control, or the tokenizer's size, may have hidden the NaN from the draw.
        """
        if not self._asked.rows:
            return
        places = {row: place for place, row in enumerate(self._rows)}
        own = self._logprob_parts[1][:, self._asked.rows, 0]  # [num_steps, rows that asked]
        for step, index in own.isnan().nonzero().tolist():
            token_ids[step][places[self._asked.rows[index]]] = NO_TOKEN

    def _logprobs(self) -> dict[int, RowLogprobs] | None:
        if not self._asked.rows:
            return None
        step = tuple(part.numpy() for part in self._logprob_parts)
        columns = zip(*self._asked, strict=True)
        return {slot: RowLogprobs(step, row, count) for row, slot, count in columns}

    def _prompt_logprobs(self) -> dict[int, list[TokenLogprobs]] | None:
        if not self._spans:
            return None
        counts = [count for _, number, count in self._spans for _ in range(number)]
        tokens = iter(plain(TopLogprobs(*self._prompt_parts), counts))
        return {slot: [next(tokens) for _ in range(number)] for slot, number, _ in self._spans}
