"""PoolResult: a batch's pooled results, on their way from the device to plain values.

Owns the copies to the host and the wait for them. Never decides what is computed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nv_engine.batch import PooledRows, StepResult
from nv_engine.device.download import to_host


class PoolRow(NamedTuple):
    """The place of one chunk's result."""

    slot: int
    row: int
    """Of the step's rows."""
    width: int
    """Values that are kept."""
    ends: bool
    """Whether its prompt ends in this step."""
    tokens: slice | None
    """Of the step's tokens, if each has a result; None: the prompt has one."""


class PoolResult:
    """A batch's results.

    Args:
        wanted: the chunks.
        outputs: as `PoolWork.compute` returned them.
    """

    def __init__(self, wanted: Sequence[PoolRow], outputs: Sequence[Tensor]) -> None:
        self._wanted = wanted
        self._parts = [to_host(part) for part in outputs]
        self._event: torch.cuda.Event | None = None
        if outputs[0].is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def is_ready(self) -> bool:
        """Whether the step has ended."""
        event = self._event
        return event is None or bool(event.query())  # type: ignore[no-untyped-call]

    def result(self) -> StepResult:
        """Wait for the step and read what it made."""
        if self._event is not None:
            self._event.synchronize()
        results_SO, is_finite = self._parts[0].numpy(), self._parts[1].tolist()
        tokens_TO = self._parts[2] if len(self._parts) > 2 else None
        pooled: dict[int, PooledRows] = {}
        broken: list[int] = []
        for slot, row, width, ends, tokens in self._wanted:
            if not is_finite[row]:
                broken.append(slot)
            if tokens is not None:
                assert tokens_TO is not None, "computed if a prompt asks"
                rows = tokens_TO[tokens, :width]
                if not rows.isfinite().all():
                    broken.append(slot)
                pooled[slot] = PooledRows(width, rows.numpy().tobytes())
            elif ends:
                pooled[slot] = PooledRows(width, results_SO[row, :width].tobytes())
        return StepResult([], broken=broken, pooled=pooled)
